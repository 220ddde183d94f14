"""The first tests to run on a new machine: each kernel once at the shapes of a real model, a captured chain of
dependent launches, and an engine as it is served.

Without a GPU they run in Triton's interpreter at small shapes (`TRITON_INTERPRET=1`), to check the tests themselves.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine import LLM, SamplingParams
from proa_engine.kernels.attention.rotate_and_cache import rotate_and_cache, rotate_and_cache_reference
from proa_engine.kernels.attention.store_kv import cache_rows
from proa_engine.kernels.experts.moe import ExpertMatrices, FusedExperts, LoopedExperts
from proa_engine.kernels.experts.moe_route import Routing, route, route_reference
from proa_engine.kernels.fp8 import Fp8Form, quantize, quantize_reference
from proa_engine.kernels.products.fp8_linear import Fp8BlockLinear, Fp8Linear
from proa_engine.kernels.products.gpu_linear import InvariantLinear
from proa_engine.kernels.products.int_linear import IntLinear
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.products.skinny_fp8 import skinny_fp8_linear, skinny_fp8_linear_reference
from proa_engine.kernels.products.skinny_gemm import skinny_gemm_linear, skinny_gemm_linear_reference
from proa_engine.kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from proa_engine.kernels.sampling.decode_inputs import decode_inputs, decode_inputs_reference
from proa_engine.kernels.sampling.drafts import propose_ngrams, propose_ngrams_reference
from proa_engine.kernels.sampling.draw_tokens import draw_tokens, draw_tokens_reference
from proa_engine.kernels.sampling.token_bitmask import token_bitmask
from proa_engine.kernels.sampling.token_limits import token_limits
from proa_engine.kernels.silu_and_mul import activate_and_mul_reference, silu_and_mul
from proa_engine.preflight.devices import read_gpus
from support.interpreter import patch_language
from support.kernel_cases import (
    attend,
    attention_case,
    limit_cases,
    mask_cases,
    sampling_cases,
    skinny_gemm_cases,
    top_k_case,
)
from support.kernels.case import on_device
from support.launch_chain import check_captured_chain
from support.quantized_cases import expert_case, in_channels, int_case, matrix_in_blocks, skinny_fp8_cases
from support.shape_models import make_shape_model

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile_pool,
    pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="no GPU"),
]
on_gpu_only = pytest.mark.skipif(not HAS_GPU, reason="no GPU")


@pytest.fixture(scope="module", autouse=True)
def _language() -> None:
    if INTERPRETED:
        patch_language()


@dataclass(frozen=True)
class Sizes:
    dtype: torch.dtype = torch.bfloat16
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    experts: int = 128
    expert_inner: int = 768
    prompt: int = 1024
    context: int = 700
    batch: int = 64


SIZES = Sizes() if HAS_GPU else Sizes(torch.float16, 256, 128, 4, 2, 16, 8, 128, 20, 40, 3)
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024 if HAS_GPU else 64,
    "intermediate_size": 3072 if HAS_GPU else 96,
    "num_attention_heads": 16 if HAS_GPU else 4,
    "num_key_value_heads": 8 if HAS_GPU else 2,
    "head_dim": 128 if HAS_GPU else 16,
    "vocab_size": 151936 if HAS_GPU else 300,
    "num_hidden_layers": 28 if HAS_GPU else 2,
    "max_position_embeddings": 40960 if HAS_GPU else 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def near(ours: torch.Tensor, theirs: torch.Tensor, share: float = 0.02) -> None:
    """Compare mean errors: kernels are wrong by much more than by their rounding."""
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    assert ours.isfinite().all()
    error = (ours - theirs).abs().mean() / theirs.abs().mean()
    assert error < share, f"relative error {error}"


def rows(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, size).to(SIZES.dtype)


def test_the_device_and_the_libraries_compute() -> None:
    x = torch.ones(256, 256, device=DEVICE).to(SIZES.dtype)
    assert (x @ x == 256).all()
    near(silu_and_mul(x), activate_and_mul_reference(x.cpu(), "silu"))


def test_norm_and_silu() -> None:
    x, residual, weight = rows(SIZES.batch, SIZES.hidden), rows(SIZES.batch, SIZES.hidden), rows(1, SIZES.hidden)[0]
    theirs = add_rms_norm_reference(x.clone(), residual.clone(), weight, 1e-6)
    ours = add_rms_norm(x.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-6)
    for each, expected in zip(ours, theirs, strict=True):
        near(each, expected)
    x = rows(SIZES.batch, 2 * SIZES.inner)
    near(silu_and_mul(x.to(DEVICE)), activate_and_mul_reference(x, "silu"))


def test_rotation_and_cache() -> None:
    heads = rows(SIZES.batch, (SIZES.heads + 2 * SIZES.kv_heads) * SIZES.head_dim)
    heads = heads.view(SIZES.batch, -1, SIZES.head_dim)
    angles = torch.randn(SIZES.batch, SIZES.head_dim // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    theirs = torch.zeros(2, 10, SIZES.kv_heads, 16, SIZES.head_dim, dtype=SIZES.dtype)
    ours, slots = theirs.to(DEVICE, copy=True), torch.randperm(160)[: SIZES.batch]
    there = [tensor.to(DEVICE) for tensor in (heads, cos, sin, slots)]
    query = rotate_and_cache(there[0], None, there[1], there[2], ours[0], ours[1], there[3])
    rows_of_slots = cache_rows(slots, theirs[0].shape)
    near(query, rotate_and_cache_reference(heads, None, cos, sin, theirs[0], theirs[1], rows_of_slots))
    near(ours, theirs)


@pytest.mark.parametrize("kind", ["decodes", "prompts", "both"])
def test_attention(kind: str) -> None:
    decodes = [(1, SIZES.context + 3 * index) for index in range(SIZES.batch)] if kind != "prompts" else []
    prompts = [(SIZES.prompt, SIZES.prompt), (9, SIZES.context)] if kind != "decodes" else []
    case = attention_case(
        [*decodes, *prompts],
        num_heads=SIZES.heads,
        num_kv_heads=SIZES.kv_heads,
        head_dim=SIZES.head_dim,
        scale=SIZES.head_dim**-0.5,
        dtype=SIZES.dtype,
        device=DEVICE,
    )
    near(attend(case, None, SIZES.head_dim**-0.5), case.expected)


def test_products_of_few_rows() -> None:
    for case in skinny_gemm_cases([(SIZES.hidden, SIZES.hidden)], 2, SIZES.dtype, device=DEVICE):
        for ours, theirs in zip(
            case.products(2, skinny_gemm_linear), case.products(2, skinny_gemm_linear_reference), strict=True
        ):
            near(ours, theirs)


def test_products_of_few_rows_of_8_bits() -> None:
    shape = (SIZES.hidden, SIZES.hidden) if HAS_GPU else (4, 128)  # fewer programs for the interpreter
    for case in skinny_fp8_cases([shape], 2, SIZES.dtype, device=DEVICE):
        for ours, theirs in zip(
            case.products(2, skinny_fp8_linear), case.products(2, skinny_fp8_linear_reference), strict=True
        ):
            near(ours, theirs)


def test_products_of_8_and_4_bits_and_batch_invariant_ones() -> None:
    x = rows(SIZES.batch, SIZES.hidden)
    for form, kind, (weight, scales) in (
        (Fp8Form(), Fp8Linear, in_channels(torch.randn(SIZES.hidden, SIZES.hidden))),
        (Fp8Form(group=128), Fp8BlockLinear, matrix_in_blocks(SIZES.hidden, SIZES.hidden)),
    ):
        quantized = quantize_reference(x, form)
        near(quantize(x.to(DEVICE), form).values, quantized.values)
        near(
            kind(weight.to(DEVICE), scales.to(DEVICE), None, form)(on_device(quantized, DEVICE)),
            kind(weight, scales, None, form)(quantized),
        )
    for bits in (4, 8):
        integers = int_case(SIZES.hidden, SIZES.hidden, bits=bits, dtype=SIZES.dtype)
        near(IntLinear(on_device(integers, DEVICE), None)(x.to(DEVICE)), IntLinear(integers, None)(x))
    weight = rows(SIZES.hidden, SIZES.hidden)
    near(InvariantLinear(weight.to(DEVICE))(x.to(DEVICE)), Linear(weight)(x))


def test_experts() -> None:
    case = expert_case(
        SIZES.batch,
        hidden=SIZES.hidden // 2,
        inner=SIZES.expert_inner,
        experts=SIZES.experts,
        k=4,
        dtype=SIZES.dtype,
    )
    logits = torch.randn(SIZES.batch, SIZES.experts).to(SIZES.dtype)
    routing = Routing(4, normalize=True)
    near(route(logits.to(DEVICE), routing)[0], route_reference(logits, routing)[0])
    fused = FusedExperts(ExpertMatrices(case.gate_up.to(DEVICE)), ExpertMatrices(case.down.to(DEVICE)))
    looped = LoopedExperts([Linear(w) for w in case.gate_up], [Linear(w) for w in case.down])
    for num_tokens in (1, SIZES.batch):
        arguments = [tensor[:num_tokens] for tensor in (case.x, case.weights, case.experts)]
        near(fused(*(tensor.to(DEVICE) for tensor in arguments)), looped(*arguments))


def test_inputs_samples_and_drafts() -> None:
    token_ids, table = torch.randint(500, (6, 90), dtype=torch.int32), torch.randint(40, (6, 23), dtype=torch.int32)
    places = torch.tensor([[5, 0, 2, 0], [88, 1, 37, 0], [1, 1, 1, 0]])
    inputs = decode_inputs(places.to(DEVICE), token_ids.to(DEVICE), table[None].to(DEVICE), 4)
    assert torch.equal(inputs.input_ids.cpu(), decode_inputs_reference(places, token_ids, table[None], 4).input_ids)
    for masked in mask_cases(SIZES.dtype):
        logits = masked.logits.to(DEVICE)
        token_bitmask(logits, masked.rows.to(DEVICE), masked.bits.to(DEVICE))
        assert torch.equal(logits.cpu(), masked.expected)
    for case in sampling_cases(SIZES.dtype):
        arguments = case.logits, case.params, case.slots, case.positions
        there = [tensor.to(DEVICE) for tensor in arguments]
        case.check_limits(token_limits(*there[:3]))
        drawn = draw_tokens(*there, has_limits=True).cpu()
        assert (drawn != draw_tokens_reference(*arguments, has_limits=True)).sum() <= 1
    (limits,) = limit_cases(SIZES.dtype)
    limits.check_limits(token_limits(limits.logits.to(DEVICE), limits.params.to(DEVICE), limits.slots.to(DEVICE)))
    case = top_k_case(torch.bfloat16)
    case.check_limits(token_limits(case.logits.to(DEVICE), case.params.to(DEVICE), case.slots.to(DEVICE)))
    lengths, drafts = torch.randint(3, 60, (6,)), torch.full((6, 4), 7)
    theirs = [torch.tensor([[5, 0, 2], [90, 90, 90], [5, 1, 3]]), token_ids, lengths, drafts]
    ours = [tensor.to(DEVICE, copy=True) for tensor in theirs]
    propose_ngrams(ours[0], ours[1], ours[2], ours[3], min_ngram=1, max_ngram=3)
    propose_ngrams_reference(theirs[0], theirs[1], theirs[2], theirs[3], min_ngram=1, max_ngram=3)
    for each, expected in zip(ours, theirs, strict=True):
        assert torch.equal(each.cpu(), expected)


@on_gpu_only
def test_gpus_of_the_driver_are_those_of_torch() -> None:
    gpus = read_gpus()
    assert gpus is not None
    properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    assert len(gpus.memory) == len(properties)
    assert max(gpus.memory) == pytest.approx(max(each.total_memory for each in properties), rel=0.05)


@on_gpu_only
def test_a_captured_chain_equals_its_kernels_launched_one_by_one() -> None:
    check_captured_chain(SIZES.hidden, SIZES.inner, num_layers=4, num_replays=50)


@pytest.mark.timeout(100)
def test_an_engine_as_it_is_served_generates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the default memory budget, graphs of all sizes, and its kernels compiled by other processes."""
    caplog.set_level(logging.INFO)
    memory: dict[str, Any] = {} if HAS_GPU else {"num_gpu_blocks_override": 64}
    llm = LLM(
        str(make_shape_model(tmp_path, MODEL)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=16384 if HAS_GPU else 128,
        **memory,
    )
    params = SamplingParams(temperature=0.6, max_tokens=20, ignore_eos=True, detokenize=False)
    for count in (1, SIZES.batch):
        prompts = [{"prompt_token_ids": [2 + index] * 30} for index in range(count)]
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert all(len(token_ids) == 20 for token_ids in outputs)
        assert all(0 <= token < MODEL["vocab_size"] for token_ids in outputs for token in token_ids)
    assert "precompilation failed" not in caplog.text
    assert "was compiled after the warm-up" not in caplog.text
