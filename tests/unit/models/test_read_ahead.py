"""Tensors that are read ahead are those that safetensors reads, in bounded memory, and errors reach the caller."""

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa_engine.builtin import builtin_model_folder
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Slice
from proa_engine.models import read_ahead, read_config
from proa_engine.models.loader import load_model
from proa_engine.models.read_ahead import ReadAhead, split
from proa_engine.models.weight_sources import CheckpointWeights
from proa_engine.sources.tensors import Tensor
from proa_engine.sources.weight_headers import read_header

CPU = torch.device("cpu")
TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.uint8),
)
SHAPES = ((), (1,), (7,), (5, 3), (64, 130), (3, 5, 7), (2, 3, 2, 5), (0, 4))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 1024)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 8 * 1024)
    monkeypatch.setattr(read_ahead, "LEAST_RUN_BYTES", 100)


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-weights")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert reader_threads() == []


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    drawn = torch.randint(0, 100, (size,), dtype=torch.uint8)  # has no bytes of 0xff: NaN equals nothing
    return drawn.view(dtype).view(shape)


def parts_of(shape: tuple[int, ...]) -> Iterator[Slice | None]:
    yield None
    for dim, length in enumerate(shape):
        for start, end in ((0, length), (0, length // 2), (length // 3, length)):
            if end > start:
                yield Slice(dim, start, end - start)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.usefixtures("small_pieces")
def test_parts_of_all_shapes_and_types_equal_those_of_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    for layer in range(4):
        tensors = {f"layers.{layer}.{number}x": random_tensor(shape, dtype) for number, shape in enumerate(SHAPES)}
        save_file(tensors, tmp_path / f"{layer}.safetensors")
    expected = {name: tensor for path in tmp_path.iterdir() for name, tensor in load_file(path).items()}

    with CheckpointWeights(tmp_path, dtype, CPU) as checkpoint:
        for name in sorted(expected):
            shape = tuple(expected[name].shape)
            for part in parts_of(shape):
                taken = checkpoint.take(name, shape, part, dtype)
                want = expected[name] if part is None else expected[name].narrow(part.dim, part.start, part.length)
                assert taken.dtype == dtype
                assert taken.is_contiguous()
                assert (
                    torch.equal(taken.view(torch.uint8), want.contiguous().view(torch.uint8))
                    if shape
                    else taken == want
                )
        checkpoint.finish()


@pytest.mark.usefixtures("small_pieces")
def test_any_order_of_asking_gives_the_same_tensors(tmp_path: Path) -> None:
    tensors = {f"layers.{layer}.{name}.weight": torch.randn(40, 50) for layer in range(12) for name in "abc"}
    save_file(tensors, tmp_path / "model.safetensors")
    names = list(tensors)
    random.Random(0).shuffle(names)

    with CheckpointWeights(tmp_path, torch.float32, CPU) as checkpoint:
        for name in names:
            first, second = Slice(1, 0, 20), Slice(1, 20, 30)  # of one tensor
            both = [checkpoint.take(name, (40, 50), part) for part in (first, second)]
            assert torch.equal(torch.cat(both, 1), tensors[name])


@pytest.mark.usefixtures("small_pieces")
def test_what_is_copied_to_a_device_piece_by_piece_is_the_same(tmp_path: Path) -> None:
    tensors = {f"layers.{layer}.{name}": torch.randn(40, 50) for layer in range(12) for name in "ab"}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    reader = ReadAhead({name: (path, tensor) for name, tensor in read_header(path).items()}, CPU)
    reader._is_staged = True

    for layer in range(12):
        for name, part in (("a", None), ("b", Slice(1, 3, 20))):
            taken = reader.read(f"layers.{layer}.{name}", part, lambda _: True)
            expected = tensors[f"layers.{layer}.{name}"][:, slice(3, 23) if part else slice(None)]
            assert torch.equal(taken.view(torch.float32).view(expected.shape), expected)
    reader.close()


def test_a_float_is_converted_and_a_scalar_may_be_asked_for_as_a_vector(tmp_path: Path) -> None:
    save_file({"a": torch.tensor(1.5), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")

    with CheckpointWeights(tmp_path, torch.float16, CPU) as checkpoint:
        assert torch.equal(checkpoint.take("a", (1,)), torch.tensor([1.5], dtype=torch.float16))
        assert torch.equal(checkpoint.take("b", (3,), dtype=torch.float64), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("stored", [(4, 6), (4, 1, 6, 1), (1, 4, 6)])
def test_dimensions_of_1_may_be_stored_or_not(stored: tuple[int, ...], tmp_path: Path) -> None:
    numbers = torch.arange(24.0)
    save_file({"a": numbers.view(stored), "b": numbers[:4].clone()}, tmp_path / "model.safetensors")
    with CheckpointWeights(tmp_path, torch.float32, CPU) as checkpoint:
        assert torch.equal(checkpoint.take("a", (4, 6), Slice(1, 2, 3)), numbers.view(4, 6)[:, 2:5])
        assert torch.equal(checkpoint.take("a", (4, 1, 6), Slice(0, 1, 2)), numbers.view(4, 1, 6)[1:3])
        assert torch.equal(checkpoint.take("b", (4, 1), Slice(0, 2, 2)), numbers[2:4, None])
        assert torch.equal(checkpoint.take("b", (4, 1), Slice(1, 0, 1)), numbers[:4, None])
        checkpoint.finish()


def test_a_tensor_can_be_changed_without_changing_what_is_read_later(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")

    with CheckpointWeights(tmp_path, torch.float32, CPU) as checkpoint:
        checkpoint.take("a", (4,)).zero_()
        assert torch.equal(checkpoint.take("a", (4,)), torch.ones(4))


def test_short_runs_are_read_together_and_long_ones_alone() -> None:
    tensor = Tensor("BF16", (4096, 4096), start=1000)
    (together, *_), alone = split(tensor, Slice(1, 512, 512)), split(Tensor("BF16", (4, 2**20), 0), Slice(1, 0, 2**19))
    assert (together.start, together.rows, together.run, together.stride) == (2024, 2048, 1024, 8192)
    assert [(piece.start, piece.rows, piece.run) for piece in alone] == [(row * 2**21, 1, 2**20) for row in range(4)]
    assert len(split(tensor, Slice(0, 0, 4096))) == len(split(tensor, None)) == 2


class Asked:
    """A `ReadAhead` of `layers` layers with tensors a and b; records what its threads read before it is asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, layers: int, rows: int) -> None:
        path = folder / "model.safetensors"
        save_file({f"layers.{i}.{name}": torch.zeros(rows, 256) for i in range(layers) for name in "ab"}, path)
        self.reader = ReadAhead({name: (path, tensor) for name, tensor in read_header(path).items()}, CPU)
        self.num_bytes = self.most_bytes = 0
        self._lock = threading.Lock()
        read = os.preadv

        def counted(file: int, buffers: list[bytearray], start: int) -> int:
            count = read(file, buffers, start)
            with self._lock:
                self.num_bytes += count
                self.most_bytes = max(self.most_bytes, self.num_bytes)
            return count

        monkeypatch.setattr(os, "preadv", counted)

    def read(self, name: str) -> None:
        size = self.reader.read(name, None, lambda _: True).nbytes
        with self._lock:
            self.num_bytes -= size


@pytest.mark.usefixtures("small_pieces")
def test_at_most_the_bound_and_a_piece_a_thread_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(tmp_path, monkeypatch, layers=8, rows=30)  # tensors of 30 KiB
    for layer in range(8):
        for name in "ab":
            asked.read(f"layers.{layer}.{name}")
    asked.reader.close()
    # A tensor of which the caller has only taken some pieces counts in full until all are taken.
    assert asked.most_bytes <= read_ahead.AHEAD_BYTES + read_ahead.NUM_THREADS * read_ahead.PIECE_BYTES + 30 * 1024
    assert asked.num_bytes == 0


def test_the_next_layers_are_read_while_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(tmp_path, monkeypatch, layers=8, rows=4)
    asked.read("layers.0.a")
    asked.reader._threads.shutdown()  # waits for what is submitted
    assert asked.num_bytes == read_ahead.LAYERS_AHEAD * 4 * 256 * 4
    asked.reader.close()


def test_tensors_that_are_not_needed_or_differ_are_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(tmp_path, monkeypatch, layers=8, rows=4)
    asked.reader.read("layers.0.a", None, lambda name: name != "layers.1.a")
    asked.reader.read("layers.7.a", None, lambda _: True)
    asked.reader._threads.shutdown()
    assert asked.num_bytes == 3 * 4 * 256 * 4
    asked.reader.close()


def test_of_the_first_layer_the_next_experts_are_read_but_not_those_of_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"layers.{layer}.experts.{expert}.w" for layer in (0, 1) for expert in range(6)]
    save_file({name: torch.zeros(8) for name in names}, tmp_path / "model.safetensors")
    starts_read: list[int] = []
    read = os.preadv

    def recorded(file: int, buffers: list[bytearray], start: int) -> int:
        starts_read.append(start)
        return read(file, buffers, start)

    monkeypatch.setattr(os, "preadv", recorded)

    with CheckpointWeights(tmp_path, torch.float32, CPU) as checkpoint:
        starts = {name: checkpoint._stored[name][1].start for name in names}
        for left in ("layers.0.experts.0", "layers.0.experts.4", "layers.0.experts.5"):
            checkpoint.leave(left)
        checkpoint.take("layers.0.experts.1.w", (8,))
        checkpoint._reader._threads.shutdown()
    assert {name for name in names if starts[name] in starts_read} == {names[1], names[2], names[3], names[7]}


def test_an_error_of_a_reading_thread_reaches_the_caller_and_ends_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builtin_model_folder()

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read: Input/output error"):
        load_model(
            folder,
            read_config.from_folder(folder),
            dtype=torch.float32,
            device=CPU,
            parallel=ParallelContext(),
            report=lambda _: None,
        )
    assert reader_threads() == []


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    with CheckpointWeights(tmp_path, torch.float32, CPU) as checkpoint:
        os.truncate(path, 1000)
        with pytest.raises(ValueError, match=r"model.safetensors has become shorter since its header was read"):
            checkpoint.take("a", (1000,))


def test_tensors_may_be_asked_for_by_several_threads(tmp_path: Path) -> None:
    tensors = {f"layers.{layer}.a": torch.full((100, 100), float(layer)) for layer in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    wrong: list[str] = []

    with CheckpointWeights(tmp_path, torch.float32, CPU) as checkpoint:

        def take(names: list[str]) -> None:
            wrong.extend(name for name in names if not torch.equal(checkpoint.take(name, (100, 100)), tensors[name]))

        threads = [threading.Thread(target=take, args=(list(tensors)[first::4],)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
