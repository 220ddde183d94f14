"""The files of a model's tokenizer and prompts, and their digest. Engines with equal digests have the same ones."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from proa.contract import SamplingParams
from proa.tokenizer_formats.convert import MERGES, OTHER_FILES, with_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"
"""A template in this file comes before one in tokenizer_config.json."""
OLDER_TEMPLATE_FILE: Final = "chat_template.json"
"""A template in this file, of processors, comes after both."""
GENERATION_FILE: Final = "generation_config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
MAX_DEPTH: Final = 100
"""Of objects and lists in each other in a configuration."""
FILE_NAMES: Final = (
    CHAT_TEMPLATE_FILE,
    "config_sentence_transformers.json",
    GENERATION_FILE,
    "special_tokens_map.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
)
"""Sent by GetTokenizer if they exist, sorted by name."""
CONVERTED_FILES: Final = (*OTHER_FILES, MERGES, OLDER_TEMPLATE_FILE)
"""Read for `with_converted`."""
SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters that generation_config.json may set for requests without them."""


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer files in a model folder, by name, converted as in `with_converted`."""
    names = [name for name in (*FILE_NAMES, *CONVERTED_FILES) if (folder / name).is_file()]
    return with_converted({name: (folder / name).read_bytes() for name in names})


def with_converted(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """`files` without `CONVERTED_FILES`, of which tokenizer.json and the template's file are made if there are none.
    Raises `ValueError` for one that cannot be converted."""
    made = with_tokenizer({name: data for name, data in files.items() if name != OLDER_TEMPLATE_FILE})
    template = read_object(files, OLDER_TEMPLATE_FILE).get("chat_template")
    if (
        template is None
        or CHAT_TEMPLATE_FILE in made
        or read_object(made, "tokenizer_config.json").get("chat_template")
    ):
        return made
    if not isinstance(template, str):
        raise ValueError(f"{OLDER_TEMPLATE_FILE}: chat_template must be a text")
    return made | {CHAT_TEMPLATE_FILE: template.encode()}


def digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 in hexadecimal over the name and data of each file, sorted by name; each name and each data is preceded
    by its length as eight little-endian bytes."""
    state = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()


def sampling_defaults(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The model's own values of `SAMPLING_DEFAULTS`, by name. Raises `ValueError` for values that requests cannot
    have."""
    config = read_object(files, GENERATION_FILE)
    found = {name: config[name] for name in SAMPLING_DEFAULTS if config.get(name) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"{GENERATION_FILE}: {error}") from error
    return found


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises `ValueError` with a sentence that names the
    file."""
    data = files.get(name, b"{}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error if data else 'it is empty'}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must hold a JSON object")
    if depth(value) > MAX_DEPTH:
        raise ValueError(f"{name} nests more than {MAX_DEPTH} deep")
    return value


def depth(value: object) -> int:
    """The number of containers within each other, at most one more than `MAX_DEPTH`."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        depth, level = depth + 1, [part for each in parts for part in each]
    return depth


def load_tokenizer(files: Mapping[str, bytes]) -> "Tokenizer":
    """The tokenizer in tokenizer.json, which truncates and pads nothing. Raises `ValueError` with a sentence that names
    the file."""
    from tokenizers import Tokenizer

    if TOKENIZER_FILE not in files:
        raise ValueError(f"there is no {TOKENIZER_FILE}")
    try:
        tokenizer = Tokenizer.from_buffer(files[TOKENIZER_FILE])
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("a")  # a post-processor that lacks a token panics here
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises plain exceptions, and panics, which are no `Exception`
        raise ValueError(f"tokenizer.json cannot be read: {error}") from error
    return tokenizer
