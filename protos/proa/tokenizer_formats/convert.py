"""Make tokenizer.json of the files that a folder has in its place, by their names."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from proa.tokenizer_formats.ranks import from_tekken, from_tiktoken
from proa.tokenizer_formats.sentencepiece import from_sentencepiece

TEKKEN, TIKTOKEN, SENTENCEPIECE = "tekken.json", "tiktoken.model", "tokenizer.model"
OTHER_FILES: Final = (TEKKEN, TIKTOKEN, SENTENCEPIECE)
"""The first that a folder has is converted."""
_TEKKEN_CONFIG: Final = b'{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}'


def with_tokenizer(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """`files` with a tokenizer.json in the place of the first of `OTHER_FILES`, if there is one of these and no
    tokenizer.json. Raises `ValueError` as `convert` does."""
    plain = {name: data for name, data in files.items() if name not in OTHER_FILES}
    others = [name for name in OTHER_FILES if name in files]
    if not others or "tokenizer.json" in files:
        return plain
    if others[0] == TEKKEN:
        plain = {"tokenizer_config.json": _TEKKEN_CONFIG, **plain}
    config = plain.get("tokenizer_config.json", b"{}")
    return plain | {"tokenizer.json": convert(others[0], files[others[0]], config)}


@lru_cache(maxsize=1)  # a start reads a tokenizer several times
def convert(name: str, data: bytes, tokenizer_config: bytes) -> bytes:
    """tokenizer.json of a file, whose `name` is one of `OTHER_FILES`. `tokenizer_config`: the file. Takes seconds for
    large vocabularies. Raises `ValueError` with a sentence that names the file."""
    try:
        if name == TEKKEN:
            return from_tekken(json.loads(data))
        fields = json.loads(tokenizer_config)
        return from_tiktoken(data, fields) if name == TIKTOKEN else from_sentencepiece(data, fields)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be converted to tokenizer.json: {type(error).__name__}: {error}") from error
