"""The files that make a model's tokenizer, and the digest that tells whether two engines have the same ones."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FILE_NAMES: Final = (
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Sent by GetTokenizer where they exist, in this order, which is that of their names."""


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files that a model folder has, by name."""
    return {name: (folder / name).read_bytes() for name in FILE_NAMES if (folder / name).is_file()}


def digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 in hexadecimal over name and data of each file, in the order of their names, each with its length
    before it as eight little-endian bytes."""
    state = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()
