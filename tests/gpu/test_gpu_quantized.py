"""8 and 4 bits, and experts, on a GPU: kernels and models against their references on the CPU.

Random shapes come from the cases that Triton's interpreter runs too; here also bfloat16, and the sizes of real models.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from proa_engine import LLM
from proa_engine.kernels import fp8, rms_norm, silu_and_mul
from proa_engine.kernels.attention.attention_plan import plan_reference
from proa_engine.kernels.attention.paged_attention import paged_attention, plan_attention
from proa_engine.kernels.attention.paged_attention_reference import paged_attention_reference
from proa_engine.kernels.attention.rotate_and_cache import rotate_and_cache
from proa_engine.kernels.experts import moe_route
from proa_engine.kernels.experts.moe import ExpertMatrices, FusedExperts, LoopedExperts, rows_per_block
from proa_engine.kernels.experts.moe_fp4 import Fp4Experts
from proa_engine.kernels.experts.moe_pairs import ExpertRange, align_pairs, align_pairs_reference
from proa_engine.kernels.fp4 import pack_fp4
from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows, quantize_reference
from proa_engine.kernels.products.fp4_linear import Fp4Linear
from proa_engine.kernels.products.fp8_linear import Fp8BlockLinear, Fp8Linear
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.silu_and_mul import ClampedSwiGLU
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.loader import load_model
from support.fp4_cases import KINDS, Kind, every_scale, experts_of, fp4_case, on_device
from support.kernel_cases import attention_case
from support.paged_model import PagedModel
from support.perplexity import perplexity, unseen_documents
from support.quantized_cases import (
    FORMS,
    assert_same_blocks,
    assert_same_rows,
    expert_case,
    matrix_in_blocks,
    routing,
)
from support.quantized_models import FP8_FORMATS, INT_FORMATS, SIZES, write_quantized
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
EXPERT_FORMATS = {
    "experts, fp8 blocks": FP8_FORMATS["fp8, blocks"],
    "experts, awq": INT_FORMATS["awq"],
    "experts, gptq, 8 bits": INT_FORMATS["gptq, 8 bits"],
}


def on_gpu(form: Fp8Form) -> Fp8Form:
    return Fp8Form(form.group, None if form.scale is None else form.scale.cuda())


def near(ours: torch.Tensor, theirs: torch.Tensor, share: float = 0.01) -> None:
    """Compare mean errors: single values may differ where a number lies midway between two 8-bit floats. Zeros, of
    tokens whose experts another rank holds, must be equal."""
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    assert ours.isfinite().all()
    error, size = (ours - theirs).abs().mean(), theirs.abs().mean()
    assert error <= share * size, f"mean error {error} of {size}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=["rows", "groups", "static"])
@pytest.mark.parametrize("size", [384, 4096, 14336])
def test_quantization_alone_and_after_norm_and_silu(size: int, form: Fp8Form, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 33, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    assert_same_rows(fp8.quantize(x.cuda(), on_gpu(form)), quantize_reference(x, form), share=0)
    ours, _ = rms_norm.rms_norm_fp8(x.cuda(), None, weight.cuda(), 1e-6, on_gpu(form))
    # The device's rms_norm on the same numbers differs in the last bit of bfloat16, which is a step of 8 bits at times.
    assert_same_rows(ours, rms_norm.rms_norm_fp8(x, None, weight, 1e-6, form)[0], share=0.03)
    ours, total = rms_norm.rms_norm_fp8(x.cuda(), residual.cuda(), weight.cuda(), 1e-6, on_gpu(form))
    theirs, expected = rms_norm.rms_norm_fp8(x.clone(), residual, weight, 1e-6, form)
    assert_same_rows(ours, theirs, share=0.03)
    torch.testing.assert_close(total.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    both = torch.cat((x, residual), -1)
    ours = silu_and_mul.silu_and_mul_fp8(both.cuda(), on_gpu(form))
    # As the kernel, which rounds once: in 16 bits the reference rounds each operation.
    expected = silu_and_mul.activate_and_mul_reference(both.float(), "silu").to(dtype)
    assert_same_rows(ours, quantize_reference(expected, form), share=0.03)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 100, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (256, 14336), (1152, 512)])
def test_products_of_8_bits(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    bias = torch.randn(outputs).to(dtype)
    for form, kind, (weight, scales) in (
        (Fp8Form(), Fp8Linear, in_channels(outputs, inputs)),
        (Fp8Form(group=128), Fp8BlockLinear, matrix_in_blocks(outputs, inputs)),
    ):
        x = quantize_reference(torch.randn(rows, inputs).to(dtype), form)
        expected = kind(weight, scales, bias, form)(x)
        on_device = QuantizedRows(x.values.cuda(), x.scales.cuda(), dtype)
        ours = kind(weight.cuda(), scales.cuda(), bias.cuda(), form)(on_device)
        near(ours, expected, 0.01)  # cuBLAS's quick sums of 8 bits keep 14 bits


def in_channels(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = quantize_reference(torch.randn(outputs, inputs), Fp8Form())
    return rows.values, rows.scales.flatten()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 300, 3000])  # 16: the most pairs that are not sorted
def test_experts_of_floats_and_of_8_bits(tokens: int, dtype: torch.dtype) -> None:
    case = expert_case(tokens, hidden=512, inner=256, experts=32, k=4, dtype=dtype)
    arguments = case.x, case.weights, case.experts
    on_device = [each.cuda() for each in arguments]
    looped = LoopedExperts([Linear(w) for w in case.gate_up], [Linear(w) for w in case.down])
    fused = FusedExperts(ExpertMatrices(case.gate_up.cuda()), ExpertMatrices(case.down.cuda()))
    near(fused(*on_device), looped(*arguments))
    for form, kind, ((gate_up, gate_up_scales), (down, down_scales)) in (
        (Fp8Form(), Fp8Linear, case.in_channels()),
        (Fp8Form(group=128), Fp8BlockLinear, case.in_blocks()),
    ):
        looped = LoopedExperts(
            [kind(w, s, None, form) for w, s in zip(gate_up, gate_up_scales, strict=True)],
            [kind(w, s, None, form) for w, s in zip(down, down_scales, strict=True)],
        )
        fused = FusedExperts(
            ExpertMatrices(gate_up.cuda(), gate_up_scales.cuda()), ExpertMatrices(down.cuda(), down_scales.cuda()), form
        )
        # Where gate and up differ in their last bit, some of 8 bits differ too: 2 % of one token's mean.
        near(fused(*on_device), looped(*arguments), 0.03)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 17, 40, 100, 300, 3000])
def test_products_of_4_bit_floats(rows: int, kind: Kind, dtype: torch.dtype) -> None:
    """By one program for each tile of outputs, and by several."""
    for outputs, inputs in ((1032, 4064), (6144, 4096), (28672, 1024)):
        stored, bias = on_device(fp4_case(kind, outputs, inputs), "cuda"), torch.randn(outputs).to("cuda", dtype)
        x = torch.randn(rows, inputs).to("cuda", dtype)
        ours, theirs = Fp4Linear(stored, bias), F.linear(x.double(), stored.dequantize().double(), bias.double())
        for _ in range(3):  # the counters are zeros again after each
            near(ours(x), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_4_bit_float_is_exact(dtype: torch.dtype) -> None:
    stored = every_scale()
    weights = Fp4Linear(on_device(stored, "cuda"), None)(torch.eye(16, dtype=dtype, device="cuda"))
    assert torch.equal(weights.t().cpu(), stored.dequantize().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 300, 3000])  # 16: the most pairs that are not sorted
def test_experts_of_4_bit_floats(tokens: int, kind: Kind, dtype: torch.dtype) -> None:
    case = expert_case(tokens, hidden=480, inner=352, experts=32, k=4, dtype=dtype)
    stored = fp4_case(kind, 32, 704, 480), fp4_case(kind, 32, 480, 352)
    biases = torch.randn(32, 704).to(dtype), torch.randn(32, 480).to(dtype)
    (_, first), (_, second) = (experts_of(*each) for each in zip(stored, biases, strict=True))
    gate_up, down = (
        Fp4Experts(pack_fp4(on_device(each, "cuda"), bias.cuda())) for each, bias in zip(stored, biases, strict=True)
    )
    activation = ClampedSwiGLU(alpha=1.702, limit=7.0)
    ours = FusedExperts(gate_up, down, activation=activation)(case.x.cuda(), case.weights.cuda(), case.experts.cuda())
    theirs = LoopedExperts(first, second, activation)(case.x, case.weights, case.experts)
    scale = theirs.abs().max()
    near(ours / scale.cuda(), theirs / scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 300, 3000])  # 16: the most pairs that are not sorted
def test_a_rank_sums_the_experts_that_it_holds(tokens: int, dtype: torch.dtype) -> None:
    case = expert_case(tokens, hidden=512, inner=256, experts=32, k=4, dtype=dtype)
    arguments = case.x, case.weights, case.experts
    for held in (ExpertRange(0, 11, 32), ExpertRange(22, 10, 32), ExpertRange(31, 1, 32)):
        part = slice(held.first, held.first + held.size)
        gate_up, down = case.gate_up[part], case.down[part]
        looped = LoopedExperts([Linear(w) for w in gate_up], [Linear(w) for w in down], held=held)
        fused = FusedExperts(ExpertMatrices(gate_up.cuda()), ExpertMatrices(down.cuda()), held=held)
        near(fused(*(each.cuda() for each in arguments)), looped(*arguments))


@pytest.mark.parametrize("experts", [9, 128])
@pytest.mark.parametrize("tokens", [1, 3, 130, 256, 8192])
def test_pairs_are_aligned_in_order(tokens: int, experts: int) -> None:
    chosen = routing(tokens, 8, experts - 1)  # the last expert gets no token
    block_size = rows_per_block(chosen.numel(), experts)
    for held in (ExpertRange.all(experts), ExpertRange(experts // 3, experts // 2, experts)):
        ours = align_pairs(chosen.cuda(), held, block_size)
        assert_same_blocks(ours, align_pairs_reference(chosen, held, block_size))


@pytest.mark.parametrize("dtype", DTYPES)
def test_routes(dtype: torch.dtype) -> None:
    logits = torch.randn(500, 128).to(dtype)
    routing = moe_route.Routing(8, normalize=True)
    weights, experts = moe_route.route(logits.cuda(), routing)
    expected, expected_experts = moe_route.route(logits, routing)
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-4, atol=1e-5)
    scores = logits.float().softmax(-1)  # equal ones may come in any order
    of_ours, of_theirs = (scores.gather(1, each.long().cpu()) for each in (experts, expected_experts))
    torch.testing.assert_close(of_ours, of_theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_8_bits_is_written_and_read(dtype: torch.dtype) -> None:
    heads = torch.randn(37, 8 + 2 * 2, 128).to(dtype) * 3
    cos, sin = torch.randn(2, 37, 64)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    slots = torch.randperm(160)[:37]
    theirs = torch.zeros(2, 10, 2, 16, 128).to(fp8.FP8)
    ours, scales = theirs.cuda(), (0.5, 2.0)
    rotate_and_cache(heads, None, cos, sin, theirs[0], theirs[1], slots, cache_scales=scales)
    on_gpu = heads.cuda(), None, cos.cuda(), sin.cuda(), ours[0], ours[1], slots.cuda()
    rotate_and_cache(*on_gpu, cache_scales=scales)
    assert (ours.float().cpu() != theirs.float()).float().mean() < 0.01
    for lens in ([(1, 1), (1, 37), (1, 700)], [(1, 33), (3, 3), (70, 900)]):
        case = attention_case(lens, num_heads=16, num_kv_heads=4, head_dim=128, scale=0.1, dtype=dtype)
        caches = case.key_cache.to(fp8.FP8), case.value_cache.to(fp8.FP8)
        metadata = case.metadata
        batch = metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table
        plan = plan_reference(*batch, caches[0].shape, None)
        expected = paged_attention_reference(case.query, *caches, plan, 0.1)
        on_device = batch[0].cuda(), batch[1].cuda(), batch[2].cuda()
        plan_there = plan_attention(*on_device, metadata.num_decodes, caches[0].shape, None)
        out = paged_attention(
            case.query.cuda(),
            caches[0].cuda(),
            caches[1].cuda(),
            *on_device,
            plan_there,
            num_decodes=metadata.num_decodes,
            scale=0.1,
        )
        torch.testing.assert_close(out.float().cpu(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", [*FP8_FORMATS, *INT_FORMATS, "fp8 while loading", "experts", *EXPERT_FORMATS])
def test_models_give_the_logits_of_the_cpu(name: str, tmp_path: Path) -> None:
    quantization, format = None, (FP8_FORMATS | INT_FORMATS).get(name)
    if "experts" in name:
        sizes = SIZES | {"moe_intermediate_size": 256}
        folder = make_tiny_model(tmp_path / "source", "qwen3_moe", seed=3, **sizes)
        format = EXPERT_FORMATS.get(name)
    else:
        folder = make_tiny_model(tmp_path / "source", "qwen3", seed=3, **SIZES)
        quantization = "fp8" if name == "fp8 while loading" else None
    if format is not None:
        folder, _ = write_quantized(folder, tmp_path, format)
    config = read_config.from_folder(folder, quantization)
    logits = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        model = load_model(
            folder,
            config,
            dtype=dtype,
            device=torch.device(device),
            parallel=ParallelContext(),
            report=lambda line: None,
        )
        paged = PagedModel(model, dtype=dtype, device=device)
        logits[device, dtype] = model.compute_logits(paged.prefill([token % 250 for token in range(100)], 37))
    # Tensor cores keep 14 bits of a sum of 8-bit products. On the CPU, noise of 2^-14 before each quantization moves
    # logits by 3 to 9 %, since numbers become their neighbours of 8 bits, and bfloat16 moves them by 10 to 13 %.
    in_float32, in_bfloat16 = (0.1, 0.2) if name in FP8_FORMATS or "fp8" in name else (0.03, 0.15)
    near(logits["cuda", torch.float32], logits["cpu", torch.float32], in_float32)
    near(logits["cuda", torch.bfloat16], logits["cpu", torch.float32], in_bfloat16)


@pytest.mark.timeout(600)
def test_fp8_leaves_the_perplexity_within_one_percent_of_bfloat16() -> None:
    documents = unseen_documents(conversations=200, questions=100)
    in_8_bits: dict[str, Any] = {"quantization": "fp8"}
    common: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "num_gpu_blocks_override": 2048}
    plain, *rounded = (
        perplexity(LLM("builtin", **common, **options), documents)
        for options in ({}, in_8_bits, in_8_bits | {"kv_cache_dtype": "fp8"})
    )
    print(f"perplexity {plain:.5f}, in 8 bits {rounded[0]:.5f}, the cache too {rounded[1]:.5f}")
    for value in rounded:
        assert abs(value / plain - 1) < 0.01
