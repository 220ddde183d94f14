"""The files that a folder of Hugging Face has, made from a GGUF file's metadata when they are read."""

import json
from collections.abc import Callable
from pathlib import Path

from proa_engine.sources.gguf.checkpoint import make_config, read_first
from proa_engine.sources.gguf.header import Header, is_gguf
from proa_engine.sources.gguf.prompt_files import (
    chat_template,
    make_generation_config,
    make_tokenizer,
    make_tokenizer_config,
)

_MAKERS: dict[str, Callable[[Header], bytes | None]] = {
    "chat_template.jinja": chat_template,
    "config.json": lambda header: json.dumps(make_config(header)).encode(),
    "generation_config.json": lambda header: json.dumps(make_generation_config(header)).encode(),
    "tokenizer.json": make_tokenizer,
    "tokenizer_config.json": lambda header: json.dumps(make_tokenizer_config(header)).encode(),
}


def make_file(path: Path) -> bytes | None:
    """The content of `FILE.gguf/NAME`; None if no such file is made, or if the path is no such path. Raises ValueError
    for a GGUF file that cannot be read."""
    make = _MAKERS.get(path.name)
    return make(read_first(path.parent)) if make and is_gguf(path.parent) else None
