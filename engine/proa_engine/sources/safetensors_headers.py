"""Headers of safetensors files: the names, types and shapes of their tensors, read without the tensors.

The package `safetensors` would check files too, but imports torch or NumPy and makes an object of each tensor.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec

from proa_engine.sources.regular_files import check_regular, refuse_lfs_pointer
from proa_engine.sources.tensors import ITEM_BYTES, Tensor

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_NAME_CHARACTERS = 1000  # quantization's rules look at each run of a name's parts
MAX_DIMS = 16

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]


class _Entry(msgspec.Struct):
    dtype: Annotated[str, msgspec.Meta(max_length=20)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


_header_decoder = msgspec.json.Decoder(dict[_Name, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name. Raises ValueError for a file whose header is invalid, or that is shorter or
    longer than its header says, or that has a type of numbers which no engine loads."""
    check_regular(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        beginning = file.read(8)
        refuse_lfs_pointer(path, beginning + file.read(32))
        length = int.from_bytes(beginning, "little")
        file.seek(8)
        header = file.read(length) if length <= min(size - 8, MAX_HEADER_BYTES) else b""
    try:
        entries = _header_decoder.decode(header)
        entries.pop("__metadata__", None)
        tensors = {name: _entry_decoder.decode(entry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        reason = f"its header is invalid: {error}" if header else "its first bytes are not the length of a header"
        raise ValueError(f"{path} is not a readable safetensors file: {reason}") from error
    data_bytes = size - 8 - length
    _check_offsets(path, tensors, data_bytes)
    return {
        name: Tensor(entry.dtype, entry.shape, 8 + length + entry.data_offsets[0]) for name, entry in tensors.items()
    }


def _check_offsets(path: Path, tensors: dict[str, _Entry], data_bytes: int) -> None:
    end = max((entry.data_offsets[1] for entry in tensors.values()), default=0)
    if end != data_bytes:
        header = path.stat().st_size - data_bytes
        raise ValueError(
            f"{path} is not a readable safetensors file: it has {header + data_bytes:,} bytes, its header says "
            f"{header + end:,}; was it copied or downloaded in full?"
        )
    for name, entry in tensors.items():
        first, last = entry.data_offsets
        item_bytes = ITEM_BYTES.get(entry.dtype)
        if item_bytes is None:
            raise ValueError(f"{path}: {name} is stored as {entry.dtype}; supported: {', '.join(ITEM_BYTES)}")
        if last - first != prod(entry.shape) * item_bytes:
            raise ValueError(
                f"{path} is not a readable safetensors file: {name} has {last - first:,} bytes, which are not those of "
                f"{entry.dtype} {_shown(entry.shape)}"
            )
    begin, before = 0, "the header"
    for name, (first, last) in sorted(((n, e.data_offsets) for n, e in tensors.items()), key=lambda each: each[1]):
        if first != begin:
            raise ValueError(
                f"{path} is not a readable safetensors file: {name} begins at byte {first:,} of the data, but {before} "
                f"ends at {begin:,}"
            )
        begin, before = last, name


def _shown(shape: Sequence[int]) -> str:
    return str(list(shape))
