"""Tensors that clients send as prompt embeddings: base64 of what `torch.save` writes, as vLLM takes them.

The gateway has no torch, and must know the number of tokens, so it reads the file itself, and reads less than torch
does: an uncompressed zip archive with one dense, contiguous tensor of float32, float16 or bfloat16. Its pickle may use
the operations that torch's own writer uses for such a tensor, and names that are bound to functions here: no code is
run, and memory is allocated for no more than what was sent. (`torch.load` has decompressed bombs and accepted sparse
tensors with indices out of bounds, CVE-2025-62164.) Values are copied as they are; the engine checks that they are
finite.
"""

import asyncio
import io
import pickle
import pickletools
import struct
import zipfile
from binascii import a2b_base64
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from proa.contract import EmbeddingType, PromptEmbeds
from proa.contract.prompt_embeds import hashed
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedField

PARAM: Final = "prompt_embeds"
MAX_PICKLE_BYTES = 4096  # torch writes about 200 for a tensor
MAX_DIRECTORY_BYTES = 64 * 1024  # of the zip archive; torch writes about 500
_END_RECORD_BYTES = 22
_OPCODES = frozenset(
    (
        *("PROTO", "STOP", "GLOBAL", "BINPUT", "BINGET", "MARK", "BINUNICODE", "BINPERSID", "REDUCE"),
        *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "NEWTRUE", "NEWFALSE"),
    )
)
# What `zipfile` and `pickle` raise for files that they cannot read
_UNREADABLE = (
    *(zipfile.BadZipFile, pickle.UnpicklingError, struct.error, EOFError),
    *(ValueError, RuntimeError, LookupError, AttributeError, TypeError, OverflowError),
)


@dataclass(frozen=True, slots=True)
class _Storage:
    type: EmbeddingType
    name: str  # of its record in the archive


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int  # values of the storage before the first
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # values of the storage from one index to the next, by dimension


class TensorError(ValueError):
    """Its text is a sentence without a full stop for the client."""


async def read_prompt_embeds(texts: Sequence[str], model: ServedModel) -> list[PromptEmbeds]:
    """Read and hash the tensors, on a thread. Raises `InvalidRequest`, also if the model's engines accept none."""
    size = model.info.prompt_embeds_size
    if texts and not size:
        message = f"{PARAM}: the engines of {model.name!r} accept none; start them with --enable-prompt-embeds."
        raise UnsupportedField(message, param=PARAM)
    return [await asyncio.to_thread(_read, f"{PARAM}[{index}]", text, size) for index, text in enumerate(texts)]


def _read(param: str, text: str, size: int) -> PromptEmbeds:
    try:
        data = a2b_base64(text, strict_mode=True)
    except ValueError:
        raise InvalidRequest(f"{param}: must be base64.", param=PARAM) from None
    try:
        return hashed(load_tensor(data, size))
    except TensorError as error:
        raise InvalidRequest(f"{param}: {error}.", param=PARAM) from None


def load_tensor(data: bytes, size: int) -> PromptEmbeds:
    """The tensor that `torch.save` wrote: [tokens, size], or one such in a batch. Raises `TensorError`."""
    try:
        tensor, values = _load(data)
    except TensorError:
        raise
    except _UNREADABLE:
        raise TensorError("must be a tensor as torch.save writes it, in its zip format") from None
    shape = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
    if len(shape) != 2 or shape[0] < 1 or shape[1] != size:
        raise TensorError(f"must have the shape [tokens, {size}], got {list(tensor.shape)[:8]}")
    if any(length > 1 and stride != wanted for length, stride, wanted in _strides(tensor)):
        raise TensorError("must be contiguous: send tensor.contiguous()")
    width = tensor.storage.type.num_bytes
    first, length = tensor.offset * width, prod(shape) * width
    if tensor.offset < 0 or first + length > len(values):
        raise TensorError("has fewer values than its shape says")
    part = values[first : first + length]
    return PromptEmbeds(num_tokens=shape[0], type=tensor.storage.type, values=part)


def _load(data: bytes) -> tuple[_Tensor, bytes]:
    """The tensor of an archive, and the bytes of its storage."""
    end = data[-_END_RECORD_BYTES:]
    if end[:4] != b"PK\5\6" or int.from_bytes(end[12:16], "little") > MAX_DIRECTORY_BYTES:
        raise zipfile.BadZipFile  # before `ZipFile` makes an object of each entry
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (pickled,) = (name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1)
        folder = pickled.removesuffix("data.pkl")
        if (order := entries.get(f"{folder}byteorder")) is not None and _read_entry(archive, order, 16) != b"little":
            raise TensorError("must be little-endian")
        tensor = _unpickle(_read_entry(archive, entries[pickled], MAX_PICKLE_BYTES))
        return tensor, _read_entry(archive, entries[f"{folder}data/{tensor.storage.name}"], len(data))


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, max_bytes: int) -> bytes:
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > max_bytes:
        raise TensorError("must be an archive that is not compressed, with one tensor, as torch.save writes it")
    return archive.read(entry)


def _unpickle(data: bytes) -> _Tensor:
    for opcode, *_ in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise TensorError("must be one dense tensor and nothing else")
    tensor = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(tensor, _Tensor):
        raise TensorError("must be one dense tensor and nothing else")
    return tensor


class _Unpickler(pickle.Unpickler):
    """Knows the names that torch writes for a dense tensor."""

    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get((module, name))
        if found is None:
            wanted = "a dense tensor of float32, float16 or bfloat16"
            raise TensorError(f"must be {wanted}, and has {module[:40]}.{name[:40]}")
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, name, _, _ = pid
        if kind != "storage" or not isinstance(storage_type, EmbeddingType) or not isinstance(name, str):
            raise TypeError
        return _Storage(storage_type, name)


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> _Tensor:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides) or {*map(type, numbers)} != {int}:
        raise TypeError
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(tensor: Any, requires_grad: Any, hooks: Any) -> Any:
    return tensor


_NAMES: Mapping[tuple[str, str], Callable[..., Any] | EmbeddingType] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): OrderedDict,  # of hooks
    ("torch", "FloatStorage"): EmbeddingType.FLOAT32,
    ("torch", "HalfStorage"): EmbeddingType.FLOAT16,
    ("torch", "BFloat16Storage"): EmbeddingType.BFLOAT16,
}


def _strides(tensor: _Tensor) -> list[tuple[int, int, int]]:
    """The length of each dimension, its stride and that of a contiguous tensor."""
    contiguous = [prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    return list(zip(tensor.shape, tensor.strides, contiguous, strict=True))
