"""Layers whose norms and activations are fused into skinny products give the results of unfused layers."""

from pathlib import Path

import pytest
import torch

from proa_engine.kernels import gpu_linear
from proa_engine.kernels.skinny_gemm import MAX_ROWS, SkinnyGemm, skinny_gemm_linear_reference
from proa_engine.layers import embedding, linear
from proa_engine.layers import mlp as moe
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.base import CausalLM
from proa_engine.models.config import ModelConfig
from proa_engine.models.loader import load_model
from support.paged_model import CachedSequence, PagedModel
from support.tiny_models import ARCHITECTURES, make_tiny_model


def load(folder: Path) -> CausalLM:
    return load_model(
        folder,
        ModelConfig.from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )


def decode(model: CausalLM) -> torch.Tensor:
    """Logits of a prompt with many rows, then of decodes with few rows."""
    paged, sequences = PagedModel(model), [CachedSequence(list(range(3, 30))) for _ in range(MAX_ROWS)]
    hidden = [*paged.step([(sequence, 20) for sequence in sequences])]
    for count in (MAX_ROWS, 1):
        hidden += paged.step([(sequence, 1) for sequence in sequences[:count]])
    return model.compute_logits(torch.cat(hidden))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gemma3_text", "olmo3"])
def test_decodes_of_few_rows_give_the_same_logits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    num_layers = len(ModelConfig.from_folder(folder).layers)
    expected = decode(load(folder))
    num_products = 0

    def multiply(*arguments: object, **options: bool) -> torch.Tensor:
        nonlocal num_products
        num_products += 1
        return skinny_gemm_linear_reference(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_linear, "skinny_gemm_linear", multiply)
    monkeypatch.setattr(gpu_linear, "skinny_gemm_form", lambda weight: SkinnyGemm())
    for layers in (linear, embedding, moe):
        monkeypatch.setattr(layers, "make_linear", lambda weight, bias=None, **_: gpu_linear.GpuLinear(weight, bias))
    torch.testing.assert_close(decode(load(folder)), expected, atol=1e-5, rtol=1e-5)
    assert num_products >= 2 * num_layers * 3
