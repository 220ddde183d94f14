"""The digest of a model's weights: a byte changed anywhere changes it, and nothing else does."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Slice
from proa_engine.models import read_ahead, read_config
from proa_engine.models.digest import WeightsDigest
from proa_engine.models.loader import load_model
from proa_engine.models.weight_sources import CheckpointWeights
from proa_engine.sources.weight_headers import read_header
from support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
ROWS, COLUMNS = 24, 40


def digests_of_ranks(folder: Path, num_ranks: int) -> list[bytes]:
    """What each rank of the model in the folder has loaded."""
    found = []
    for rank in range(num_ranks):
        digest = WeightsDigest()
        load_model(
            folder,
            read_config.from_folder(folder),
            dtype=torch.float32,
            device=CPU,
            parallel=ParallelContext(rank, num_ranks),
            report=lambda _: None,
            digest=digest,
        )
        found.append(digest.digest())
    return found


def flip(path: Path, place: int) -> None:
    """Change a byte of a file. Calling it again undoes that."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 1024)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 8 * 1024)
    monkeypatch.setattr(read_ahead, "LEAST_RUN_BYTES", 100)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_byte_changed_anywhere_changes_the_digests(architecture: str, num_ranks: int, tmp_path: Path) -> None:
    """In each tensor, at a place that is drawn."""
    folder = make_tiny_model(tmp_path, architecture, num_hidden_layers=1)
    path = folder / "model.safetensors"
    before, drawn = digests_of_ranks(folder, num_ranks), random.Random(0)
    for name, tensor in read_header(path).items():
        place = tensor.start + drawn.randrange(tensor.num_bytes)
        flip(path, place)
        assert digests_of_ranks(folder, num_ranks) != before, name
        flip(path, place)
    assert digests_of_ranks(folder, num_ranks) == before


def take_all(folder: Path, names: Sequence[str], parts: Sequence[Slice | None]) -> bytes:
    digest = WeightsDigest()
    with CheckpointWeights(folder, torch.bfloat16, CPU, digest) as checkpoint:
        for name in names:
            for part in parts:
                checkpoint.take(name, (ROWS, COLUMNS), part)
    return digest.digest()


DIVISIONS: dict[str, list[Slice | None]] = {  # of a tensor among ranks
    "none": [None],
    "rows": [Slice(0, start, ROWS // 3) for start in range(0, ROWS, ROWS // 3)],
    "columns, in short runs": [Slice(1, start, COLUMNS // 4) for start in range(0, COLUMNS, COLUMNS // 4)],
}


@pytest.mark.parametrize("divided", DIVISIONS.values(), ids=DIVISIONS)
@pytest.mark.usefixtures("small_pieces")
def test_each_byte_counts_however_a_tensor_is_divided(divided: list[Slice | None], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    save_file({f"layers.{layer}.a": torch.randn(ROWS, COLUMNS).bfloat16() for layer in range(3)}, path)
    tensors = read_header(path)
    before = take_all(tmp_path, list(tensors), divided)
    last = tensors["layers.2.a"]
    for place in range(last.start, last.start + last.num_bytes, 13):
        flip(path, place)
        assert take_all(tmp_path, list(tensors), divided) != before, place
        flip(path, place)


@pytest.mark.usefixtures("small_pieces")
def test_order_files_and_what_is_read_ahead_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tensors = {f"layers.{layer}.{name}": torch.randn(ROWS, COLUMNS).bfloat16() for layer in range(8) for name in "ab"}
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    save_file(tensors, one / "model.safetensors")
    for name in "ab":
        save_file({each: tensors[each] for each in tensors if each.endswith(name)}, two / f"{name}.safetensors")
    names, some = sorted(tensors), [f"layers.{layer}.a" for layer in range(4)]  # the next ones are read ahead too
    before = take_all(one, names, [None]), take_all(one, some, [None])
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 1)
    random.Random(0).shuffle(names)
    assert (take_all(two, names, [None]), take_all(two, some[::-1], [None])) == before


def test_names_types_and_shapes_count_beside_bytes(tmp_path: Path) -> None:
    zeros = torch.zeros(4, 6)
    stored = (
        *({"a": zeros}, {"b": zeros}, {"a": zeros.view(torch.bfloat16).view(4, 12)}, {"a": zeros.view(6, 4).clone()}),
        *({"a": zeros, "c": zeros[:0].clone()}, {"a": zeros[:3].clone(), "c": zeros[3:].clone()}),
    )
    digests = set()
    for tensors in stored:
        save_file(tensors, tmp_path / "model.safetensors")
        digest = WeightsDigest()
        with CheckpointWeights(tmp_path, torch.float32, CPU, digest) as checkpoint:
            for name, tensor in tensors.items():
                checkpoint.take(name, tuple(tensor.shape))
        digests.add(digest.digest())
    assert len(digests) == len(stored)


def test_a_copy_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    shutil.copytree(folder, tmp_path / "copy")
    assert digests_of_ranks(tmp_path / "copy", 1) == digests_of_ranks(folder, 1)


def test_a_tensor_that_is_not_loaded_does_not_count(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    before, path = digests_of_ranks(folder, 1), folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path)
    assert digests_of_ranks(folder, 1) == before
