"""Rows of 8-bit integers, and products by weights of 8 and 4 bits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from proa_engine.kernels.fp4 import StoredFp4, pack_fp4
from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows, quantize_reference
from proa_engine.kernels.int8 import quantize_int8, quantize_int8_reference
from proa_engine.kernels.int_weights import IntWeight, dequantize_int, pack_int
from proa_engine.kernels.products import fp4_linear, int_linear
from proa_engine.kernels.products.fp4_linear import Fp4Linear, choose_tiling, fp4_matmul
from proa_engine.kernels.products.fp8_linear import Fp8BlockLinear, Fp8Linear, fp8_block_matmul
from proa_engine.kernels.products.int8_linear import int8_matmul, int8_matmul_reference
from proa_engine.kernels.products.int_linear import IntLinear, int_matmul
from proa_engine.kernels.products.product_tile import new_counters
from proa_engine.kernels.tilings import tilings_of
from support.fp4_cases import KINDS, Kind, every_scale, fp4_case
from support.kernels.case import KernelCase, close, equal, grid, holds, near, on_device, patched_tiles, table
from support.quantized_cases import FORMS, INT8_FORMS, in_channels, int_case, matrix_in_blocks

INT8_DTYPES = (torch.float32, torch.bfloat16)


@holds(
    interpreted=[{"rows": 7, "size": 1, "form": "rows"}, *grid(rows=[7], size=(200, 384), form=INT8_FORMS)],
    gpu=grid(rows=[33], size=(200, 4096, 14336), form=INT8_FORMS),
    dtypes=INT8_DTYPES,
)
def rows_of_integers(dtype: torch.dtype, device: str, rows: int, size: int, form: str) -> None:
    """Rows of zeros, of one sign, of numbers in the middle between two integers, and beyond the range."""
    how = INT8_FORMS[form]
    x = torch.randn(rows, size).to(dtype)
    x[1], x[2], x[3], x[4] = 0, x[2].abs(), -x[3].abs(), 1000 * x[4]
    step = 0.5 if how.scale is None else 0.5 * float(how.scale)
    x[5] = (torch.arange(size) % 9 - 4) * step  # middles between integers
    ours = on_device(quantize_int8(*on_device((x, how), device)), "cpu")
    theirs = quantize_int8_reference(x, how)
    equal((ours.values, ours.scales), (theirs.values, theirs.scales))
    assert (ours.zeros is None) == (theirs.zeros is None) == how.symmetric
    if ours.zeros is not None:
        equal(ours.zeros, theirs.zeros)
    dequantized = (ours.values - (0 if ours.zeros is None else ours.zeros)) * ours.scales
    assert not dequantized[1].any()
    if how.scale is None:  # the largest of symmetric rows is half a step beyond the range
        assert ((dequantized - x.float()).abs() <= 0.51 * ours.scales).all()


@holds(
    interpreted=grid(
        table(
            "rows outputs inputs has_bias",
            *((1, 40, 72, False), (5, 136, 1100, True), (37, 24, 264, False), (130, 72, 40, True)),
        ),
        has_zeros=(False, True),
    ),
    gpu=grid(
        table("outputs inputs", (6144, 4096), (256, 14336), (1160, 520)),
        rows=(1, 3, 16, 17, 100, 300),
        has_bias=[True],
        has_zeros=(False, True),
    ),
    dtypes=INT8_DTYPES,
)
def products_of_integers(
    dtype: torch.dtype, device: str, rows: int, outputs: int, inputs: int, has_bias: bool, has_zeros: bool
) -> None:
    """Integers of the whole range, whose sums are exact: beyond 2^24 too, which float32 would round."""
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    values = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
    weight[0], values[0] = -128, -128
    scales, x_scales = torch.rand(outputs) * 1e-4 + 1e-4, torch.rand(rows, 1) * 1e-4 + 1e-4
    zeros = torch.randint(-128, 128, (rows, 1), dtype=torch.int32) if has_zeros else None
    x = QuantizedRows(values, x_scales, dtype, zeros)
    sums = weight.sum(1, dtype=torch.int32) if has_zeros else None
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    ours = int8_matmul(*on_device((x, weight, scales, sums, bias), device)).cpu()
    reference = int8_matmul_reference(x, weight.float(), scales, sums, bias)
    if device != "cpu":
        torch.testing.assert_close(ours, reference, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-4)
        return
    assert torch.equal(reference, ours)
    exact = (values.long() - (0 if zeros is None else zeros.long())) @ weight.long().t()
    expected = exact.float() * x_scales * scales + (0 if bias is None else bias)
    close(ours, expected.to(dtype), 0.05 if dtype == torch.float32 else 1.0)


def quantized_product(
    rows: int, outputs: int, inputs: int, form: str, has_bias: bool, dtype: torch.dtype
) -> tuple[Any, ...]:
    x = quantize_reference(torch.randn(rows, inputs).to(dtype), FORMS[form])
    weight = matrix_in_blocks(outputs, inputs) if form == "groups" else in_channels(torch.randn(outputs, inputs))
    return x, *weight, torch.randn(outputs).to(dtype) if has_bias else None, FORMS[form]


def fp8_linear(x: QuantizedRows, weight: torch.Tensor, scales: torch.Tensor, bias: Any, form: Fp8Form) -> torch.Tensor:
    return (Fp8Linear if form.group is None else Fp8BlockLinear)(weight, scales, bias, form)(x)


def by_kernel_or_layer(matmul: Callable[..., Any], layer: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """The kernel for tensors on a CPU, where a layer computes the reference."""

    def multiply(x: Any, *operands: Any) -> torch.Tensor:
        is_cpu = (x if isinstance(x, torch.Tensor) else x.values).is_cpu
        y: torch.Tensor = (matmul if is_cpu else layer)(x, *operands)
        return y

    return multiply


def near_on_gpus(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if ours.is_cuda:
        near(ours, theirs)  # cuBLAS's quick sums of 8 bits keep 14 bits
    else:
        close(ours, theirs)


def in_proportion(ours: torch.Tensor, theirs: torch.Tensor, times: float = 1.0) -> None:
    """As `close`, if the largest of theirs were 1; on a GPU, compare mean errors."""
    if ours.is_cuda:
        near(ours, theirs)
        return
    largest = theirs.double().abs().max()
    close((ours.double() / largest).to(ours.dtype), (theirs.double() / largest).to(ours.dtype), times)


PRODUCTS_OF_8_BITS = KernelCase(
    make=quantized_product,
    operation=by_kernel_or_layer(lambda *operands: fp8_block_matmul(*operands[:4]), fp8_linear),
    reference=fp8_linear,
    compare=near_on_gpus,
    interpreted=grid(
        table("rows outputs has_bias", (1, 128, False), (3, 200, True), (150, 256, False)),
        inputs=[256],
        form=["groups"],
    ),
    gpu=grid(
        table("outputs inputs", (6144, 4096), (256, 14336), (1152, 512)),
        rows=(1, 3, 16, 17, 100, 300),
        form=("rows", "groups"),
        has_bias=[True],
    ),
)


def product_by_integers(
    rows: int,
    outputs: int,
    inputs: int,
    group_size: int,
    bits: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    shuffled: bool = False,
    first: int = 0,
    has_fractions: bool = False,
    tiles: int | None = None,
) -> tuple[Any, ...]:
    """`first` of a rank's inputs, which has some of each group. `has_fractions`: scales and zeros in float32, whatever
    the type of x, as GGUF's blocks have them."""
    of_scales = torch.float32 if has_fractions else dtype
    weight = int_case(outputs, inputs, bits=bits, group_size=group_size, shuffled=shuffled, dtype=of_scales)
    if has_fractions:
        weight = replace(weight, zeros=weight.zeros + torch.rand(weight.zeros.shape))
    if first:
        assert weight.groups is not None
        weight = replace(weight, numbers=weight.numbers[:, first:], groups=weight.groups[first:], is_part=True)
    elif shuffled:
        assert pack_int(weight).group == group_size
    x = torch.randn(rows, inputs - first).to(dtype)
    return x, weight, torch.randn(outputs).to(dtype) if has_bias else None, tiles


def int_product(x: torch.Tensor, weight: IntWeight, bias: torch.Tensor | None, tiles: int | None) -> torch.Tensor:
    with patched_tiles(int_linear, tiles):
        return int_matmul(x, pack_int(weight), bias)


def exact_int_product(x: torch.Tensor, weight: IntWeight, bias: torch.Tensor | None, tiles: object) -> torch.Tensor:
    expected = x.double() @ dequantize_int(weight).to(x.dtype).double().t()
    return expected if bias is None else expected + bias.double()


PRODUCTS_BY_INTEGERS = KernelCase(
    make=product_by_integers,
    operation=by_kernel_or_layer(int_product, lambda x, weight, bias, _: IntLinear(weight, bias)(x)),
    reference=exact_int_product,
    compare=in_proportion,
    interpreted=[
        *table(  # inputs that end within a block, and groups as large as, larger and smaller than one
            "rows outputs inputs group_size bits has_bias",
            (1, 72, 128, 128, 4, True),
            (3, 130, 192, 64, 4, True),
            (17, 72, 160, 32, 8, True),
            (17, 72, 288, 96, 4, True),
            (65, 40, 256, 256, 4, True),
            (130, 136, 256, 128, 8, False),
            (2, 24, 40, 40, 8, False),
        ),
        *table("rows outputs inputs group_size bits tiles", (65, 72, 160, 32, 4, 100), (130, 72, 160, 32, 8, 100)),
        *grid(
            table("rows outputs inputs bits", (1, 72, 128, 4), (17, 72, 288, 8), (65, 40, 256, 4)),
            group_size=[32],
            has_fractions=[True],
        ),
        *grid(table("rows outputs inputs group_size shuffled", (5, 72, 256, 128, True)), bits=(4, 8), first=(0, 96)),
    ],
    gpu=[
        *grid(
            table("group_size shuffled", (32, False), (128, False), (128, True), (2048, False)),
            rows=(1, 5, 33, 200),
            bits=(4, 8),
            outputs=[1032],
            inputs=[2048],
        ),
        *grid(table("outputs inputs group_size has_fractions", (1032, 2048, 32, True)), rows=(1, 33, 200), bits=(4, 8)),
    ],
)


def fp4_product(x: torch.Tensor, stored: StoredFp4, bias: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """On a GPU three times: the counters are zeros again after each."""
    if x.is_cuda:
        linear = Fp4Linear(stored, bias)
        yield from (linear(x) for _ in range(3))
        return
    arrived = new_counters(x.device)
    yield fp4_matmul(x, pack_fp4(stored.stacked(), None if bias is None else bias[None]), arrived)
    assert not arrived.any()


@holds(interpreted=[{"stored": "every scale"}, {"stored": "mxfp4"}], gpu=[{"stored": "every scale"}])
def every_4_bit_float_is_exact(dtype: torch.dtype, device: str, stored: str) -> None:
    """Each number of 4 bits with each scale, those that are zero, negative or subnormal among them."""
    matrix = every_scale() if stored == "every scale" else fp4_case("mxfp4", 70, 160)
    identity = torch.eye(2 * matrix.codes.shape[1], dtype=dtype, device=device)
    for weights in fp4_product(identity, on_device(matrix, device), None):
        assert torch.equal(weights.t().cpu(), matrix.dequantize().to(dtype))


@holds(
    interpreted=[
        *table(  # inputs that end within a block, and tiles that one program or several compute
            "kind rows outputs inputs has_bias",
            ("nvfp4", 1, 24, 16, True),
            ("nvfp4", 3, 200, 208, True),
            ("nvfp4", 17, 72, 656, False),
            ("nvfp4", 65, 130, 1040, True),
            ("nvfp4", 130, 65, 1552, True),
            ("mxfp4", 1, 24, 32, True),
            ("mxfp4", 3, 200, 224, True),
            ("mxfp4", 17, 72, 672, False),
            ("mxfp4", 65, 130, 1056, True),
            ("mxfp4", 130, 65, 1568, True),
        ),
        *table("kind rows outputs inputs tiles", ("nvfp4", 17, 72, 272, 100), ("nvfp4", 130, 65, 272, 100)),
    ],
    gpu=grid(
        table("outputs inputs has_bias", (1032, 4064, True), (6144, 4096, True), (28672, 1024, True)),
        kind=KINDS,
        rows=(1, 2, 17, 40, 100, 300, 3000),
    ),
)
def products_of_4_bit_floats(
    dtype: torch.dtype,
    device: str,
    kind: Kind,
    rows: int,
    outputs: int,
    inputs: int,
    *,
    has_bias: bool = False,
    tiles: int | None = None,
) -> None:
    cpu = tilings_of(torch.device("cpu"))
    assert [choose_tiling(*each, 132, cpu).num_parts for each in ((17, 72, 656), (3, 200, 208))] == [2, 1]
    stored = on_device(fp4_case(kind, outputs, inputs), device)
    x = torch.randn(rows, inputs + 16).to(device, dtype)[:, :inputs]
    bias = torch.randn(outputs).to(device, dtype) if has_bias else None
    expected = x.double() @ stored.dequantize().double().t() + (0 if bias is None else bias.double())
    with patched_tiles(fp4_linear, tiles):
        for ours in fp4_product(x, stored, bias):
            in_proportion(ours, expected)
