"""Small checkpoints that the quantizers wrote themselves (tests/data/quantized) give the logits of the libraries' code.

The libraries computed in float32, as Proa does here, so that with plain activations only the order of sums differs.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.loader import load_model
from support.paged_model import PagedModel

FOLDER = Path(__file__).parents[2] / "data/quantized"
NAMES = sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())
WITH_ROUNDED_ACTIVATIONS = ("fp8", "w8a8", "mixed-fp8")  # those of others stay as they are


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = load_model(
        folder,
        read_config.from_folder(folder, None),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        load_format="auto",
        report=lambda line: None,
    )
    return model.compute_logits(PagedModel(model).prefill(ids, len(ids)))


@pytest.mark.parametrize("name", NAMES)
def test_a_quantizers_checkpoint_gives_the_logits_of_its_library(name: str) -> None:
    theirs = load_file(FOLDER / name / "theirs.safetensors")
    ours = logits(FOLDER / name, theirs["ids"].tolist())
    if not name.split("-", 2)[2].startswith(WITH_ROUNDED_ACTIVATIONS):
        in_float16 = name.startswith("autoround")  # its kernel for a CPU multiplies scales and integers in 16 bits
        torch.testing.assert_close(ours, theirs["weights"], atol=5e-3 if in_float16 else 2e-4, rtol=0)
        return
    error, effect = (ours - theirs["full"]).abs().mean(), (theirs["full"] - theirs["weights"]).abs().mean()
    print(f"error {error:.5f}, effect of rounded activations {effect:.5f}")
    assert error < 0.15 * effect, "a number in the middle of two may be rounded up here and down there, few are"
