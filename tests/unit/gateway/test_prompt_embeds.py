"""Tensors of `torch.save` as prompt embeddings: what is read, and that nothing else is, and no code is run."""

import io
import pickle
import zipfile
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proa.contract import EmbeddingType
from proa_gateway.serving.prompt_embeds import TensorError, load_tensor

SIZE = 6


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def data_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def changed(data: bytes, name: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with another content of one entry."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, content if entry.filename == name else old.read(entry))
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = values(5, SIZE, dtype=dtype)
    embeds = load_tensor(saved(tensor), SIZE)
    assert embeds.num_tokens == 5
    assert embeds.type is {4: EmbeddingType.FLOAT32}.get(dtype.itemsize, embeds.type)
    assert (embeds.type is EmbeddingType.BFLOAT16) == (dtype is torch.bfloat16)
    assert embeds.values == data_of(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        values(1, 5, SIZE),  # a batch of one
        values(3, 5, SIZE)[1],  # a part of a storage
        values(9, SIZE)[2:4],
        values(5, SIZE).requires_grad_(),
        torch.nn.Parameter(values(5, SIZE)),
        values(1, SIZE),
    ],
)
def test_contiguous_parts_batches_and_parameters_are_read(tensor: torch.Tensor) -> None:
    assert load_tensor(saved(tensor), SIZE).values == data_of(tensor)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (values(5, SIZE + 1), r"must have the shape \[tokens, 6\], got \[5, 7\]"),
        (values(SIZE), r"got \[6\]"),
        (values(2, 5, SIZE), r"got \[2, 5, 6\]"),
        (values(0, SIZE), r"got \[0, 6\]"),
        (values(SIZE, 5).T, "must be contiguous"),
        (values(5, 2 * SIZE)[:, ::2], "must be contiguous"),
        (values(5, SIZE, dtype=torch.float64), "float32, float16 or bfloat16, and has torch.DoubleStorage"),
        (values(5, SIZE).to(torch.int32), "torch.IntStorage"),
        (values(5, SIZE).to_sparse(), "must be"),
        ({"a": values(5, SIZE)}, "must be one dense tensor"),
        ([values(5, SIZE)], "must be one dense tensor"),
        ("text", "must be"),
    ],
)
def test_other_tensors_are_refused_with_a_sentence(value: object, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        load_tensor(saved(value), SIZE)


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


def test_no_code_is_run() -> None:
    data = changed(saved(values(5, SIZE)), "archive/data.pkl", pickle.dumps(Evil(), protocol=2))
    with pytest.raises(TensorError, match="must be a dense tensor"):
        load_tensor(data, SIZE)


@pytest.mark.parametrize(
    "opcode",
    [b"r\xff\xff\xff\x7f", b"\x96" + b"\xff" * 7 + b"\x00", b"i", b"\x82\x01"],  # LONG_BINPUT, BYTEARRAY8, INST, EXT1
)
def test_pickles_with_operations_that_torch_does_not_write_are_refused(opcode: bytes) -> None:
    data = changed(saved(values(5, SIZE)), "archive/data.pkl", b"\x80\x02K\x01" + opcode + b".")
    with pytest.raises(TensorError):
        load_tensor(data, SIZE)


def test_a_compressed_archive_is_refused() -> None:
    data = changed(saved(torch.zeros(50_000, SIZE)), "", b"", zipfile.ZIP_DEFLATED)
    with pytest.raises(TensorError, match="not compressed"):
        load_tensor(data, SIZE)


def test_a_storage_smaller_than_the_shape_is_refused() -> None:
    data = changed(saved(values(5, SIZE)), "archive/data/0", bytes(4 * 5 * SIZE - 4))
    with pytest.raises(TensorError, match="fewer values"):
        load_tensor(data, SIZE)


def test_an_archive_of_many_entries_is_refused_before_they_are_read() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for index in range(2000):
            archive.writestr(f"archive/data/{index}", b"")
    with pytest.raises(TensorError):
        load_tensor(file.getvalue(), SIZE)


@pytest.mark.parametrize("data", [b"", b"PK\5\6", pickle.dumps([1]), bytes(100), saved(values(5, SIZE))[:-1]])
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(TensorError, match=r"as torch\.save writes it"):
        load_tensor(data, SIZE)


SAVED = saved(values(5, SIZE))


@given(st.data())
def test_damaged_bytes_are_read_or_refused(data: st.DataObject) -> None:
    damaged = bytearray(SAVED)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(TensorError):
        load_tensor(bytes(damaged), SIZE)


PICKLED = zipfile.ZipFile(io.BytesIO(SAVED)).read("archive/data.pkl")


@given(st.data())
def test_damaged_pickles_are_read_or_refused(data: st.DataObject) -> None:
    damaged = bytearray(PICKLED)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(TensorError):
        load_tensor(changed(SAVED, "archive/data.pkl", bytes(damaged)), SIZE)
