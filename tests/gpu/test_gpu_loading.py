"""Weights that are read ahead arrive on the GPU as safetensors has them, whichever buffers their copies used before.

Without a GPU the tests run on the CPU (`TRITON_INTERPRET=1`), to check the tests themselves.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa_engine.layers.weights import Slice
from proa_engine.models import read_ahead
from proa_engine.models.weight_sources import CheckpointWeights

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"), reason="no GPU"),
]
SHAPES = {"norm": (256,), "rows": (1000, 256), "columns": (256, 4000)}
PARTS = {"norm": None, "rows": Slice(0, 100, 500), "columns": Slice(1, 1000, 500)}
NUM_LAYERS = 64


@pytest.mark.parametrize("piece_bytes", [1 << 14, 1 << 24])
def test_parts_of_many_layers_equal_those_of_safetensors(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 32 * piece_bytes)  # buffers are used again and again
    path = tmp_path / "model.safetensors"
    save_file(
        {
            f"layers.{layer}.{name}": torch.randn(shape, dtype=torch.bfloat16)
            for layer in range(NUM_LAYERS)
            for name, shape in SHAPES.items()
        },
        path,
    )
    taken = {}
    work = torch.randn(2048, 2048, device=DEVICE)

    with CheckpointWeights(tmp_path, torch.bfloat16, DEVICE) as checkpoint:
        for layer in range(NUM_LAYERS):
            work = torch.tanh(work @ work) if HAS_GPU else work  # copies wait for it, threads go on reading
            for name, shape in SHAPES.items():
                taken[f"layers.{layer}.{name}"] = checkpoint.take(f"layers.{layer}.{name}", shape, PARTS[name])
        checkpoint.finish()

    for full_name, tensor in load_file(path).items():
        part = PARTS[full_name.rpartition(".")[2]]
        expected = tensor if part is None else tensor.narrow(part.dim, part.start, part.length)
        assert taken[full_name].device.type == DEVICE.type
        assert torch.equal(taken[full_name].cpu(), expected)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_page_locked_memory_is_bounded_and_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 64 * 2**20)
    tensors = {f"layers.{layer}.w": torch.zeros(2**22, dtype=torch.bfloat16) for layer in range(256)}  # 2 GiB
    save_file(tensors, tmp_path / "model.safetensors")
    torch.cuda.reset_peak_host_memory_stats()

    with CheckpointWeights(tmp_path, torch.bfloat16, DEVICE) as checkpoint:
        for name in tensors:
            checkpoint.take(name, (2**22,))

    stats = torch.cuda.host_memory_stats()
    # Read ahead, and copied but not known to be complete; then a piece a thread.
    bound = 2 * read_ahead.AHEAD_BYTES + read_ahead.NUM_THREADS * read_ahead.PIECE_BYTES
    assert stats["allocated_bytes.peak"] <= bound + 2**20
