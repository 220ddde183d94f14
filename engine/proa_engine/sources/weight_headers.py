"""The tensors of weight files, from the files' headers. Raises ValueError for a file that cannot be read."""

from collections.abc import Iterable
from pathlib import Path

from proa_engine.sources.gguf.checkpoint import read_tensors
from proa_engine.sources.gguf.header import is_gguf
from proa_engine.sources.safetensors_headers import read_safetensors
from proa_engine.sources.tensors import Tensor


def read_headers(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of all files, by name."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= read_header(path)
    return tensors


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name."""
    return read_tensors(path) if is_gguf(path) else read_safetensors(path)
