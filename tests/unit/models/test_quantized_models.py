"""Quantized checkpoints, as they lie on disk, give the logits of their dense twins; `transformers` computes the twins'.

Where activations are quantized too, those of the twin are, before each matrix that is.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa_engine.config import LoadFormat
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.quantized.quant_fp4 import Mxfp4Packed, Nvfp4
from proa_engine.layers.quantized.quant_fp8 import BlockFp8
from proa_engine.layers.quantized.quant_int import PackQuantized
from proa_engine.layers.weights import Projection, Slice, Weights
from proa_engine.models import read_config
from proa_engine.models.base import CausalLM
from proa_engine.models.loader import load_model
from support.fp4_packing import mxfp4_tensors, nvfp4_tensors
from support.int_packing import pack_quantized_tensors
from support.mxfp4_models import write_mxfp4
from support.paged_model import PagedModel
from support.quantized_models import (
    FP4_FORMATS,
    FP8,
    FP8_FORMATS,
    INPUT_SCALE,
    INPUT_ZERO,
    INT8_FORMATS,
    INT_FORMATS,
    SIZES,
    Format,
    write_quantized,
)
from support.rounded_inputs import Hook, round_to_floats, round_to_integers
from support.stored_weights import StoredWeights
from support.tiny_models import LATENT, VOCAB_SIZE, make_tiny_model

TOKENS = torch.randint(0, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(5)).tolist()


def load(folder: Path, quantization: str | None = None, load_format: LoadFormat = "auto") -> CausalLM:
    return load_model(
        folder,
        read_config.from_folder(folder, quantization),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        load_format=load_format,
        report=lambda line: None,
    )


def logits(folder: Path, quantization: str | None = None, chunk: int = 25) -> torch.Tensor:
    model = load(folder, quantization)
    return model.compute_logits(PagedModel(model).prefill(TOKENS, chunk))


@torch.inference_mode()
def logits_of_transformers(folder: Path, prepare: Callable[[str, torch.nn.Linear], None]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            prepare(name, module)
    result: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return result


def with_rounded_inputs(folder: Path, format: Format, hook: Hook) -> torch.Tensor:
    """Logits of a dense twin whose inputs are rounded before each matrix that is quantized."""

    def prepare(module_name: str, module: torch.nn.Linear) -> None:
        if module_name.endswith("_proj") and not module_name.startswith(format.plain):
            module.register_forward_pre_hook(hook)

    return logits_of_transformers(folder, prepare)


def assert_near(
    ours: torch.Tensor, theirs: torch.Tensor, unrounded: torch.Tensor, mean: float = 0.1, median: float = 0.02
) -> None:
    """A number in the middle between two of 8 bits may be rounded up here and down there, and its row feels that; but
    what they differ by is little beside what rounding changes, `mean` and `median` of it at most."""
    error = (ours - theirs).abs()
    effect = (ours - unrounded).abs()
    print(f"error {error.mean():.5f} (median {error.median():.7f}), effect of rounding {effect.mean():.5f}")
    assert error.mean() < mean * effect.mean()
    assert error.median() < median * effect.median()


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_fp8_checkpoints_give_the_logits_of_their_dense_twins(name: str, tmp_path: Path) -> None:
    format = FP8_FORMATS[name]
    source = make_tiny_model(tmp_path / "source", "qwen3", seed=3, **SIZES)
    quantized, dense = write_quantized(source, tmp_path, format)
    hook = round_to_floats(128 if "blocks" in name else None, INPUT_SCALE if "static" in name else None)
    ours = logits(quantized)
    assert_near(ours, with_rounded_inputs(dense, format, hook), logits(dense))
    assert torch.equal(logits(quantized, chunk=1), ours), "a token's bits depend on the others of its step"


@pytest.mark.parametrize("name", INT8_FORMATS)
def test_checkpoints_of_8_bit_integers_give_the_logits_of_their_dense_twins(name: str, tmp_path: Path) -> None:
    format = INT8_FORMATS[name]
    source = make_tiny_model(tmp_path / "source", "qwen3", seed=3, **SIZES)
    quantized, dense = write_quantized(source, tmp_path, format)
    ours = logits(quantized)
    symmetric, scale = "asymmetric" not in name, INPUT_SCALE if "static" in name else None
    zero = INPUT_ZERO if scale is not None and not symmetric else 0
    theirs = with_rounded_inputs(dense, format, round_to_integers(symmetric=symmetric, scale=scale, zero=zero))
    # The steps of integers are all equal, so more numbers lie near the middle than of floats.
    assert_near(ours, theirs, logits(dense), mean=0.3, median=0.3)
    assert torch.equal(logits(quantized, chunk=1), ours), "a token's bits depend on the others of its step"


def test_online_fp8_gives_the_logits_of_weights_rounded_by_output(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path, "qwen2", seed=3, **SIZES)

    def prepare(module_name: str, module: torch.nn.Linear) -> None:
        if module_name.endswith("_proj"):
            scale = module.weight.abs().amax(1, keepdim=True) / 448
            module.weight.data = (module.weight / scale).to(FP8).float() * scale
            module.register_forward_pre_hook(round_to_floats(None, None))

    assert_near(logits(source, "fp8"), logits_of_transformers(source, prepare), logits(source))


@pytest.mark.parametrize("name", INT_FORMATS)
def test_checkpoints_of_integers_give_the_logits_of_their_dense_twins(name: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "llama", seed=3, mlp_bias=True, attention_bias=True, **SIZES)
    quantized, dense = write_quantized(source, tmp_path, INT_FORMATS[name])
    expected = logits_of_transformers(dense, lambda module_name, module: None)
    torch.testing.assert_close(logits(quantized), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "awq",
        "gptq",
        "gptq, 8 bits",
        "gptq, down in 8 bits",
        "auto-round",
        "compressed-tensors, groups",
        "compressed-tensors, 8 bits",
    ],
)
def test_experts_of_integers_give_the_logits_of_their_dense_twins(name: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen3_moe", seed=3, moe_intermediate_size=64, **SIZES)
    quantized, dense = write_quantized(source, tmp_path, INT_FORMATS[name])
    expected = logits_of_transformers(dense, lambda module_name, module: None)
    torch.testing.assert_close(logits(quantized), expected, atol=2e-4, rtol=0)


def test_experts_whose_inputs_are_out_of_order_are_refused_by_name(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen3_moe", moe_intermediate_size=96, **SIZES)
    quantized, _ = write_quantized(source, tmp_path, INT_FORMATS["gptq, inputs out of order"])
    with pytest.raises(
        ValueError, match=r"experts.0.gate_proj: experts quantized by gptq with desc_act .* not supported"
    ):
        load(quantized)


def test_latent_attention_of_integers_gives_the_logits_of_its_dense_twin(tmp_path: Path) -> None:
    heads: dict[str, Any] = {"qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    source = make_tiny_model(tmp_path / "source", "deepseek_v3", seed=3, **LATENT | heads | sizes)
    quantized, dense = write_quantized(source, tmp_path, INT_FORMATS["awq"])
    torch.testing.assert_close(logits(quantized), logits(dense), atol=2e-4, rtol=0)


MIXERS: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "lfm2_moe": {"moe_intermediate_size": 64},
    "granitemoehybrid": {"num_local_experts": 0, "shared_intermediate_size": 96, "mamba_d_head": 32},
    "nemotron_h": {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
}


@pytest.mark.parametrize("name", ["awq", "gptq"])
@pytest.mark.parametrize("family", MIXERS)
def test_mixers_of_integers_have_the_bits_of_their_dense_twins(family: str, name: str, tmp_path: Path) -> None:
    """What is not a matrix of a linear layer is plain: convolutions, time steps, norms, routers."""
    source = make_tiny_model(tmp_path / "source", family, seed=3, **SIZES | MIXERS[family])
    quantized, dense = write_quantized(source, tmp_path, INT_FORMATS[name])
    assert torch.equal(logits(quantized), logits(dense))


@pytest.mark.parametrize("name", FP4_FORMATS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_4_bit_floats_give_the_logits_of_their_dense_twins(family: str, name: str, tmp_path: Path) -> None:
    width: dict[str, Any] = {"moe_intermediate_size": 96} if family == "qwen3_moe" else {}
    source = make_tiny_model(tmp_path / "source", family, seed=3, **SIZES, **width)
    quantized, dense = write_quantized(source, tmp_path, FP4_FORMATS[name])
    expected = logits_of_transformers(dense, lambda module_name, module: None)
    torch.testing.assert_close(logits(quantized), expected, atol=2e-4, rtol=0)


def test_latent_attention_of_4_bit_floats_gives_the_logits_of_its_dense_twin(tmp_path: Path) -> None:
    heads: dict[str, Any] = {"qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    source = make_tiny_model(tmp_path / "source", "deepseek_v3", seed=3, **LATENT | heads | sizes)
    quantized, dense = write_quantized(source, tmp_path, FP4_FORMATS["nvfp4"])
    torch.testing.assert_close(logits(quantized), logits(dense), atol=2e-4, rtol=0)


def test_a_scale_that_is_not_a_number_is_refused_by_name(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen3", **SIZES)
    quantized, _ = write_quantized(source, tmp_path, FP4_FORMATS["nvfp4"])
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight_scale"][3, 2] = torch.nan
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj: a scale is not a number"):
        load(quantized)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "method", [Mxfp4Packed("weight_packed"), Nvfp4("weight_packed", "weight_global_scale", True, "")]
)
def test_two_ranks_share_a_matrix_of_4_bit_floats(method: Mxfp4Packed | Nvfp4, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(96, 320, generator=generator), torch.randn(5, 320, generator=generator)
    tensors, dense = mxfp4_tensors(weight) if isinstance(method, Mxfp4Packed) else nvfp4_tensors(weight)
    weights = Weights(StoredWeights({f"up.{name}": tensor for name, tensor in tensors.items()}), method, "up")
    half = weight.shape[dim] // 2
    parts = [
        method.load([Projection(weights, 96, 320, Slice(dim, start, half))], None).product(
            x if dim == 0 else x.narrow(1, start, half)
        )
        for start in (0, half)
    ]
    out = torch.cat(parts, dim=-1) if dim == 0 else parts[0] + parts[1]
    torch.testing.assert_close(out, x @ dense.t(), atol=1e-4, rtol=0)
    with pytest.raises(
        ValueError, match=rf"up: 168 of 320 inputs on each rank cannot be cut into groups of {method.group}"
    ):
        method.load([Projection(weights, 96, 320, Slice(1, 0, 168))], None)


def test_experts_in_4_bits_give_the_logits_of_their_dense_twins(tmp_path: Path) -> None:
    quantized, dense = write_mxfp4(make_tiny_model(tmp_path / "source", "gpt_oss", seed=3), tmp_path)
    expected = logits_of_transformers(dense, lambda module_name, module: None)
    ours = logits(quantized)
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)
    assert torch.equal(logits(quantized, chunk=1), ours), "a token's bits depend on the others of its step"


@pytest.mark.parametrize(
    "name",
    [
        *("fp8, blocks", "compressed-tensors, channels, by token", "gptq, inputs out of order", "awq"),
        *("int8, channels, by token", "int8, static, asymmetric"),
        *("nvfp4", "mxfp4", "modelopt, nvfp4"),
    ],
)
def test_dummy_weights_of_a_quantized_checkpoint_run(name: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen3", **SIZES)
    quantized, _ = write_quantized(source, tmp_path, (FP4_FORMATS | FP8_FORMATS | INT_FORMATS | INT8_FORMATS)[name])
    (quantized / "model.safetensors").unlink()
    assert PagedModel(load(quantized, load_format="dummy")).prefill(TOKENS).isfinite().all()


def test_dummy_experts_in_4_bits_run(tmp_path: Path) -> None:
    quantized, _ = write_mxfp4(make_tiny_model(tmp_path / "source", "gpt_oss"), tmp_path)
    assert PagedModel(load(quantized, load_format="dummy")).prefill(TOKENS).isfinite().all()


def test_a_quantized_tensor_is_not_taken_for_a_plain_one(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen3", **SIZES)
    quantized, _ = write_quantized(source, tmp_path, FP8_FORMATS["fp8, blocks"])
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"q_proj.weight is stored as F8_E4M3, not as float32"):
        load(quantized)


def test_blocks_that_ranks_would_cut_are_refused_by_name(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen3", **SIZES | {"head_dim": 32})
    quantized, _ = write_quantized(source, tmp_path, FP8_FORMATS["fp8, blocks"])
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj: 64 x 128 on each rank cannot be cut into blocks"):
        load_model(
            quantized,
            read_config.from_folder(quantized),
            dtype=torch.float32,
            device=torch.device("cpu"),
            parallel=ParallelContext(rank=0, world_size=2),
            report=lambda line: None,
        )


def test_a_cache_of_8_bits_gives_nearly_the_logits_of_one_of_floats(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path, "qwen3", seed=3, **SIZES))
    whole = model.compute_logits(PagedModel(model).prefill(TOKENS))
    rounded = model.compute_logits(PagedModel(model, dtype=FP8).prefill(TOKENS))
    chunks = model.compute_logits(PagedModel(model, dtype=FP8).prefill(TOKENS, 7))
    assert 0.001 < (rounded - whole).abs().mean() < 0.1 * whole.abs().mean()
    assert torch.equal(chunks, rounded)


@pytest.mark.parametrize("place", ["k_scale v_scale", "k_proj.k_scale v_proj.v_scale"], ids=["attention", "projection"])
def test_scales_of_the_cache_come_from_the_checkpoint(tmp_path: Path, place: str) -> None:
    """Scales that are powers of two change only the range: values outside e4m3's range keep their relative error."""
    folder = make_tiny_model(tmp_path, "llama", seed=3, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[prefix + "v_proj.weight"] = tensors[prefix + "v_proj.weight"] * 2**10
        tensors[prefix + "o_proj.weight"] = tensors[prefix + "o_proj.weight"] / 2**10
    save_file(tensors, folder / "model.safetensors")
    model = load(folder)
    whole = PagedModel(model).prefill(TOKENS)
    errors = []
    for scale in (1.0, 2.0**10):
        for layer in range(2):
            for name, value in zip(place.split(), (torch.tensor(1.0), torch.tensor([scale])), strict=True):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = value
        save_file(tensors, folder / "model.safetensors")
        model = load(folder)
        assert torch.equal(PagedModel(model).prefill(TOKENS), whole), "a cache of floats has no scale"
        errors.append((PagedModel(model, dtype=FP8).prefill(TOKENS) - whole).abs().mean())
    assert errors[1] < 0.1 * errors[0]


def test_biases_of_zeros_that_the_model_has_not_are_passed_over(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "llama", seed=3, **SIZES)
    quantized, _ = write_quantized(source, tmp_path, INT_FORMATS["gptq"])
    expected = logits(quantized)
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".scales")]:
        tensors[name.replace(".scales", ".bias")] = torch.zeros(tensors[name].shape[1])
    save_file(tensors, quantized / "model.safetensors")
    assert torch.equal(logits(quantized), expected)
    tensors["model.layers.0.mlp.down_proj.bias"] += 1
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj.bias is not zero, but the model has no bias there"):
        load(quantized)


@pytest.mark.parametrize("part", [Slice(0, 0, 192), Slice(0, 192, 192), Slice(0, 448, 64), Slice(1, 128, 128)])
def test_a_dequantized_part_of_a_matrix_may_begin_and_end_within_blocks(part: Slice) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(512, 256, generator=generator).to(FP8)
    scales = torch.rand(4, 2, generator=generator)
    weights = Weights(StoredWeights({"up.weight": values, "up.scale": scales}), BlockFp8("scale"), "up")
    taken = weights.method.take_matrix(Projection(weights, 512, 256, part))
    whole = values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    torch.testing.assert_close(taken, whole.narrow(part.dim, part.start, part.length))


@pytest.mark.parametrize(
    ("group_size", "sym", "shuffled"), [(32, True, False), (32, False, False), (32, False, True), (None, False, False)]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_two_ranks_share_a_pack_quantized_matrix(dim: int, group_size: int | None, sym: bool, shuffled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(128, 256, generator=generator), torch.randn(5, 256, generator=generator)
    tensors, dense = pack_quantized_tensors(weight, group_size or -1, sym=sym, shuffled=shuffled)
    stored = {
        f"up.{name}": tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }
    weights = Weights(StoredWeights(stored), PackQuantized(4, group_size, sym, shuffled), "up")
    half = weight.shape[dim] // 2
    parts = [
        weights.method.load([Projection(weights, 128, 256, Slice(dim, start, half))], None).product(
            x if dim == 0 else x.narrow(1, start, half)
        )
        for start in (0, half)
    ]
    out = torch.cat(parts, dim=-1) if dim == 0 else parts[0] + parts[1]
    torch.testing.assert_close(out, x @ dense.t(), atol=1e-4, rtol=0)
