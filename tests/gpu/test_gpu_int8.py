"""Products of 8-bit integers on a GPU: sums are exact, so rows and products equal those of the CPU but for roundings of
the result."""

from pathlib import Path

import pytest
import torch

from proa_engine.kernels.experts.moe import ExpertMatrices, FusedExperts, LoopedExperts
from proa_engine.kernels.fp8 import QuantizedRows
from proa_engine.kernels.int8 import Int8Form, quantize_int8, quantize_int8_reference
from proa_engine.kernels.products.int8_linear import Int8Linear, int8_matmul, int8_matmul_reference
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.loader import load_model
from support.paged_model import PagedModel
from support.quantized_cases import INT8_FORMS, expert_case, in_integers
from support.quantized_models import INT8_FORMATS, SIZES, write_quantized
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DTYPES = (torch.float32, torch.bfloat16)


def on_gpu(form: Int8Form) -> Int8Form:
    scale, zero = (None if each is None else each.cuda() for each in (form.scale, form.zero))
    return Int8Form(form.symmetric, scale, zero)


def near(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> None:
    error = (ours.float().cpu() - theirs.float()).abs().mean() / theirs.float().abs().mean()
    assert error < share, f"relative error {error}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", INT8_FORMS, ids=["rows", "static", "asymmetric rows", "asymmetric static"])
@pytest.mark.parametrize("size", [200, 4096, 14336])
def test_rows_are_quantized_as_on_a_cpu(size: int, form: Int8Form, dtype: torch.dtype) -> None:
    x = torch.randn(33, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1], x[2] = 0, 1000 * x[2]
    ours, theirs = quantize_int8(x.cuda(), on_gpu(form)), quantize_int8_reference(x, form)
    assert torch.equal(ours.values.cpu(), theirs.values)
    assert torch.equal(ours.scales.cpu(), theirs.scales)
    if ours.zeros is not None and theirs.zeros is not None:
        assert torch.equal(ours.zeros.cpu(), theirs.zeros)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 100, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (256, 14336), (1160, 520)])
def test_products_equal_those_of_a_cpu(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
    values = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8, generator=generator)
    scales, x_scales = torch.rand(outputs) * 1e-4, torch.rand(rows, 1) * 1e-4
    bias = torch.randn(outputs).to(dtype)
    for zeros in (None, torch.randint(-128, 128, (rows, 1), dtype=torch.int32)):
        sums = None if zeros is None else weight.sum(1, dtype=torch.int32)
        x = QuantizedRows(values, x_scales, dtype, zeros)
        expected = int8_matmul_reference(x, weight.float(), scales, sums, bias)
        there = QuantizedRows(values.cuda(), x_scales.cuda(), dtype, None if zeros is None else zeros.cuda())
        ours = int8_matmul(there, weight.cuda(), scales.cuda(), None if sums is None else sums.cuda(), bias.cuda())
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 300, 3000])  # 16: the most pairs that are not sorted
def test_experts_of_integers(tokens: int, dtype: torch.dtype) -> None:
    case = expert_case(tokens, hidden=512, inner=256, experts=32, k=4, dtype=dtype)
    arguments = case.x, case.weights, case.experts
    static = Int8Form(scale=torch.tensor([0.03])), Int8Form(scale=torch.tensor([0.006]))
    for forms in ((Int8Form(), Int8Form()), static):
        stored = in_integers(case.gate_up), in_integers(case.down)
        first, second = (
            [Int8Linear(weight, scales, None, form) for weight, scales in zip(*each, strict=True)]
            for each, form in zip(stored, forms, strict=True)
        )
        gate_up, down = (ExpertMatrices(weight.cuda(), scales.cuda()) for weight, scales in stored)
        fused = FusedExperts(gate_up, down, on_gpu(forms[0]), down_form=on_gpu(forms[1]))
        near(fused(*(each.cuda() for each in arguments)), LoopedExperts(first, second)(*arguments), 0.02)


@pytest.mark.parametrize("name", [*INT8_FORMATS, "experts"])
def test_models_give_the_logits_of_the_cpu(name: str, tmp_path: Path) -> None:
    kind, sizes = ("qwen3_moe", SIZES | {"moe_intermediate_size": 256}) if name == "experts" else ("qwen3", SIZES)
    source = make_tiny_model(tmp_path / "source", kind, seed=3, **sizes)
    folder, _ = write_quantized(source, tmp_path, INT8_FORMATS.get(name, INT8_FORMATS["int8, channels, by token"]))
    logits = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        model = load_model(
            folder,
            read_config.from_folder(folder),
            dtype=dtype,
            device=torch.device(device),
            parallel=ParallelContext(),
            report=lambda line: None,
        )
        paged = PagedModel(model, dtype=dtype, device=device)
        logits[device, dtype] = model.compute_logits(paged.prefill([token % 250 for token in range(100)], 37))
    near(logits["cuda", torch.float32], logits["cpu", torch.float32], 0.03)
    near(logits["cuda", torch.bfloat16], logits["cpu", torch.float32], 0.15)
