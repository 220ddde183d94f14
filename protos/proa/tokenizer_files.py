"""The files of a model's tokenizer and prompts, and their digest. Engines with equal digests have the same ones."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"
"""A template in this file comes before one in tokenizer_config.json."""
FILE_NAMES: Final = (
    CHAT_TEMPLATE_FILE,
    "config_sentence_transformers.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Sent by GetTokenizer if they exist, sorted by name."""
SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters that generation_config.json may set for requests without them."""


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer files in a model folder, by name."""
    return {name: (folder / name).read_bytes() for name in FILE_NAMES if (folder / name).is_file()}


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
    """The model's own values of `SAMPLING_DEFAULTS`, by name."""
    config = json.loads(files.get("generation_config.json", b"{}"))
    found = config if isinstance(config, dict) else {}
    return {name: found[name] for name in SAMPLING_DEFAULTS if isinstance(found.get(name), int | float)}
