"""Headers of GGUF files: the metadata, and the names, types and shapes of the tensors.

The package `gguf` would read them too, but imports NumPy and makes objects of each token: 2 s for a vocabulary of
49,152, where this takes 0.05 s.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

from proa_engine.layers.quantized.ggml_types import BLOCKS
from proa_engine.sources.regular_files import check_regular, refuse_lfs_pointer
from proa_engine.sources.tensors import ITEM_BYTES

SUFFIX = ".gguf"
MAX_HEADER_BYTES = 256 << 20  # of a vocabulary of 262,144 tokens it has 16 MB
MAX_DIMS = 4  # GGUF's own limit
READ_BYTES = 1 << 20
_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)  # they differ in the byte order that is allowed
_STRING, _ARRAY = 8, 9
_FLOAT = 6
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", _FLOAT: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Types of tensors, by number. What is neither in `BLOCKS` nor in `ITEM_BYTES` cannot be read.
_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`type`: GGUF's name. `start`: the offset of the first byte in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Header:
    """`fields`: the metadata by name; strings are bytes, also those in lists."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Sequence[StoredTensor]

    def text(self, name: str) -> str:
        """A string of the metadata; empty if there is none. Raises ValueError for another type."""
        value = self.fields.get(name, b"")
        if not isinstance(value, bytes):
            raise ValueError(f"{self.path}: {name} is not a text")
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {name} is not valid UTF-8") from error

    def entries(self, name: str) -> list[Any]:
        """A list of the metadata; empty if there is none. Raises ValueError for another type."""
        value = self.fields.get(name, [])
        if not isinstance(value, list):
            raise ValueError(f"{self.path}: {name} is not a list")
        return value

    def require(self, name: str) -> Any:
        """Raises ValueError if the metadata has no such field."""
        if name not in self.fields:
            raise ValueError(f"{self.path} lacks the field {name}")
        return self.fields[name]


def is_gguf(path: Path) -> bool:
    """Whether `path` is read as a GGUF file. A folder may have such a name too."""
    return path.suffix == SUFFIX and not path.is_dir()


def parts_of(path: Path) -> list[Path]:
    """All files of a model that llama.cpp has split, by any of them; of others the file itself."""
    found = _PART.fullmatch(path.name)
    if not found:
        return [path]
    count = int(found["count"])
    return [path.with_name(f"{found['name']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]


def read_header(path: Path) -> Header:
    """Read the header of one file. Raises ValueError for one that is invalid, or for a file that is shorter than its
    header says."""
    check_regular(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        data = _Bytes(path, file, min(size, MAX_HEADER_BYTES))
        if data.take(4) != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF")
        (version,) = data.numbers("I", 1)
        if version not in _SUPPORTED_VERSIONS:
            raise ValueError(f"{path} has version {version} of GGUF; supported: 2 and 3, little-endian")
        num_tensors, num_fields = data.numbers("Q", 2)
        fields = {}
        for _ in range(num_fields):
            name = _text(path, data.strings(1)[0])
            (kind,) = data.numbers("I", 1)
            fields[name] = _value(data, kind)
        infos = [_tensor(data) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{path}: general.alignment is {alignment!r}")
    begin = -(-data.position // alignment) * alignment
    tensors = [StoredTensor(each.name, each.type, each.shape, begin + each.start) for each in infos]
    for tensor in tensors:
        _check_end(path, tensor, size)
    return Header(path, fields, tensors)


class _Bytes:
    """The first `limit` bytes of a file, read as they are asked for."""

    def __init__(self, path: Path, file: BufferedReader, limit: int) -> None:
        self.path, self.position = path, 0
        self._file, self._limit, self._read = file, limit, bytearray(file.read(min(limit, READ_BYTES)))
        refuse_lfs_pointer(path, self._read)

    def take(self, count: int) -> bytes:
        start, end = self.position, self.position + count
        self._fill(end)
        self.position = end
        return bytes(self._read[start:end])

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        """`kind`: a letter of `struct`."""
        return struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize(f"<{kind}")))

    def strings(self, count: int) -> list[bytes]:
        """A loop of its own, because vocabularies have hundreds of thousands."""
        read, position, found = self._read, self.position, []
        for _ in range(count):
            start = position + 8
            self._fill(start)
            end = start + int.from_bytes(read[position:start], "little")
            self._fill(end)
            found.append(bytes(read[start:end]))
            position = end
        self.position = position
        return found

    def _fill(self, end: int) -> None:
        """Read up to `end`. Raises ValueError if the header cannot reach so far."""
        missing = end - len(self._read)
        if missing <= 0:
            return
        if end <= self._limit:
            self._read += self._file.read(min(max(missing, READ_BYTES), self._limit - len(self._read)))
        if end > len(self._read):
            raise ValueError(
                f"{self.path} is not a readable GGUF file: its header does not end before byte {self._limit:,}; was it "
                "copied or downloaded in full?"
            )


def _value(data: _Bytes, kind: int) -> Any:
    if kind in _NUMBERS:
        (number,) = data.numbers(_NUMBERS[kind], 1)
        return _shortest(number) if kind == _FLOAT else number
    if kind == _STRING:
        return data.strings(1)[0]
    if kind == _ARRAY:
        (inner,) = data.numbers("I", 1)
        (count,) = data.numbers("Q", 1)
        if inner in _NUMBERS:
            return list(data.numbers(_NUMBERS[inner], count))
        if inner == _STRING:
            return data.strings(count)
    raise ValueError(f"{data.path} is not a readable GGUF file: its metadata has a value of an unknown type")


def _shortest(number: float) -> float:
    """The decimal number of the fewest digits that is stored as this float32: what the original config.json has."""
    texts = (f"{number:.{digits}g}" for digits in range(6, 10))
    return next((float(text) for text in texts if struct.pack("<f", float(text)) == struct.pack("<f", number)), number)


def _tensor(data: _Bytes) -> StoredTensor:
    """As stored, so that its start counts from the first tensor's."""
    name = _text(data.path, data.strings(1)[0])
    (num_dims,) = data.numbers("I", 1)
    if num_dims > MAX_DIMS:
        raise ValueError(f"{data.path} is not a readable GGUF file: {name} has {num_dims} dimensions")
    shape = data.numbers("Q", num_dims)[::-1]
    (kind,), (start,) = data.numbers("I", 1), data.numbers("Q", 1)
    return StoredTensor(name, _TYPES.get(kind, f"type {kind}"), shape, start)


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a readable GGUF file: a name is not valid UTF-8") from error


def _check_end(path: Path, tensor: StoredTensor, size: int) -> None:
    """Raise ValueError for a type that cannot be read, or if the file ends before the tensor does."""
    values, num_bytes = BLOCKS.get(tensor.type) or (1, ITEM_BYTES.get(tensor.type, 0))
    if not num_bytes or tensor.type.startswith("I"):
        known = ", ".join((*BLOCKS, "F16", "BF16", "F32"))
        raise ValueError(
            f"{path}: {tensor.name} is stored as {tensor.type}, which is not supported; take the model's file of type "
            f"Q4_K_M or Q8_0; supported: {known}"
        )
    if tensor.shape[-1:] and tensor.shape[-1] % values:
        raise ValueError(f"{path}: {tensor.name} has rows of {tensor.shape[-1]} values, no multiple of {values}")
    end = tensor.start + prod(tensor.shape) // values * num_bytes
    if end > size:
        raise ValueError(
            f"{path} is not a readable GGUF file: it has {size:,} bytes, {tensor.name} ends at {end:,}; was it copied "
            "or downloaded in full?"
        )
