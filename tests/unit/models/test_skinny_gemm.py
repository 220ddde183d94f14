"""Layers whose norms and activations are fused into skinny products give the results of unfused layers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine.kernels.experts import moe_router
from proa_engine.kernels.experts.moe_router import GpuRouter, RouterForm, norm_and_route_reference
from proa_engine.kernels.products import fp8_linear, gpu_linear
from proa_engine.kernels.products.fp8_linear import Fp8Product
from proa_engine.kernels.products.skinny_fp8 import skinny_fp8_linear_reference
from proa_engine.kernels.products.skinny_gemm import MAX_ROWS, SkinnyGemm, UnnormedRows, skinny_gemm_linear_reference
from proa_engine.kernels.tilings import TILINGS
from proa_engine.layers import embedding, linear
from proa_engine.layers import mlp as moe
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.base import CausalLM
from proa_engine.models.loader import load_model
from support.paged_model import CachedSequence, PagedModel
from support.quantized_models import FP8_FORMATS, SIZES, write_quantized
from support.tiny_models import ARCHITECTURES, make_tiny_model


def load(folder: Path) -> CausalLM:
    return load_model(
        folder,
        read_config.from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )


def decode(model: CausalLM) -> torch.Tensor:
    """Logits of a prompt with many rows, then of decodes with one or two."""
    paged, sequences = PagedModel(model), [CachedSequence(list(range(3, 30))) for _ in range(MAX_ROWS)]
    hidden = [*paged.step([(sequence, 20) for sequence in sequences])]
    for count in (MAX_ROWS, 1):
        hidden += paged.step([(sequence, 1) for sequence in sequences[:count]])
    return model.compute_logits(torch.cat(hidden))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gemma3_text", "olmo3"])
def test_skinny_decodes_give_the_same_logits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    num_layers = len(read_config.from_folder(folder).layers)
    expected = decode(load(folder))
    num_products = 0

    def multiply(*arguments: object, **options: bool) -> torch.Tensor:
        nonlocal num_products
        num_products += 1
        return skinny_gemm_linear_reference(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_linear, "skinny_gemm_linear", multiply)
    monkeypatch.setattr(gpu_linear, "skinny_gemm_form", lambda weight: SkinnyGemm())
    monkeypatch.setattr(moe_router, "skinny_gemm_form", lambda weight: SkinnyGemm())
    monkeypatch.setattr(moe, "make_router", GpuRouter)
    for layers in (linear, embedding):
        monkeypatch.setattr(layers, "make_linear", lambda weight, bias=None, **_: gpu_linear.GpuLinear(weight, bias))
    torch.testing.assert_close(decode(load(folder)), expected, atol=1e-5, rtol=1e-5)
    assert num_products >= 2 * num_layers * 3


@pytest.mark.parametrize(("architecture", "has_mlp"), [("llama", True), ("qwen3_moe", False)])
def test_attention_has_the_weights_of_its_layers_next_products(
    architecture: str, has_mlp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their use, to be read beforehand."""
    monkeypatch.setattr(gpu_linear, "skinny_gemm_form", lambda weight: SkinnyGemm())
    monkeypatch.setattr(linear, "make_linear", lambda weight, bias=None, **_: gpu_linear.GpuLinear(weight, bias))
    layers: list[Any] = load(make_tiny_model(tmp_path, architecture)).layers  # type: ignore[attr-defined]
    for layer in layers:
        products = [layer.attention.output.partial]
        products += [layer.mlp.gate_up.linear, layer.mlp.down.partial] if has_mlp else []
        following = layer.attention.following
        assert [id(weight) for weight in following] == [id(product.weight) for product in products]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe", "gpt_oss", "glm4_moe", "lfm2_moe", "nemotron_h"])
def test_routers_that_compute_the_norm_give_the_same_logits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every step, with shared experts and without."""
    folder = make_tiny_model(tmp_path, architecture)
    expected = decode(load(folder))
    num_rows = []

    def norm_and_route(rows: UnnormedRows, *others: Any) -> moe_router.Choice:
        num_rows.append(rows.shape[0])
        return norm_and_route_reference(rows, *others[:4])

    monkeypatch.setattr(moe_router, "norm_and_route", norm_and_route)
    monkeypatch.setattr(moe_router, "tilings_of", lambda device: TILINGS[90])
    monkeypatch.setattr(RouterForm, "together", SkinnyGemm(256))
    monkeypatch.setattr(moe, "make_router", GpuRouter)
    torch.testing.assert_close(decode(load(folder)), expected, atol=1e-5, rtol=1e-5)
    assert set(num_rows) == {20 * MAX_ROWS, MAX_ROWS, 1}


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_skinny_decodes_of_8_bits_give_the_same_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny_model(tmp_path / "source", "llama", seed=3, mlp_bias=True, attention_bias=True, **SIZES)
    folder, _ = write_quantized(source, tmp_path, FP8_FORMATS[name])
    num_layers = len(read_config.from_folder(folder).layers)
    num_mlps = num_layers - len(FP8_FORMATS[name].plain)
    expected, unrounded = decode(load(folder)), decode(load(source))
    construct, num_products, num_gated = Fp8Product.__init__, 0, 0

    def keep_weight(product: Fp8Product, *operands: Any) -> None:
        """As on a GPU."""
        construct(product, *operands)
        product.weight, product.scales, product.bias, _ = operands

    def multiply(*operands: Any, gated: bool = False) -> torch.Tensor:
        nonlocal num_products, num_gated
        num_products, num_gated = num_products + 1, num_gated + gated
        return skinny_fp8_linear_reference(*operands, gated=gated)

    monkeypatch.setattr(Fp8Product, "__init__", keep_weight)
    monkeypatch.setattr(fp8_linear, "skinny_gemm_form", lambda weight: SkinnyGemm())
    monkeypatch.setattr(fp8_linear, "skinny_fp8_linear", multiply)
    ours = decode(load(folder))
    in_two_decodes = 2 * (2 * num_layers + 2 * num_mlps), 2 * num_mlps
    assert (num_products, num_gated) == in_two_decodes
    # Sums in another order may round a number in the middle between two of 8 bits to the other one.
    assert (ours - expected).abs().mean() < 0.02 * (expected - unrounded).abs().mean()
