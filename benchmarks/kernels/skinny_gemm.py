"""Skinny products on a GPU, with the norm before and the SiLU after them: their kernel beside cuBLAS and the kernel of
few rows, both with the kernels around them. From this table comes the rule of which products are skinny. Weights are
bfloat16, or 8-bit floats with a scale for each output (Llama-3.1-8B-fp8), whose rows are quantized too.

    PYTHONPATH=tests python -m benchmarks.kernels.skinny_gemm --rows 1 2 4 --json skinny_gemm.json

Weights come in enough copies that none is found in the L2 cache; each figure is of one product within a CUDA graph. The
last line of a model is all products of a layer, one after the other. The bandwidth is the skinny kernel's.
`--thread-bytes` and `--warps` try other tilings.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.sweep import BANDWIDTH, num_copies, run_sweep, time_each
from proa_engine.kernels.fp8 import Fp8Form, quantize
from proa_engine.kernels.products import skinny_gemm
from proa_engine.kernels.products.fp8_linear import Fp8Linear
from proa_engine.kernels.products.gpu_linear import GpuLinear
from proa_engine.kernels.products.skinny_fp8 import skinny_fp8_linear
from proa_engine.kernels.products.skinny_gemm import PLAIN, SkinnyGemm, unnormed_rows
from proa_engine.kernels.rms_norm import add_rms_norm, rms_norm_fp8

_ROWS = Fp8Form()


class Way(Enum):
    CUBLAS = "cuBLAS"
    FEW_ROWS = "few rows"  # cuBLAS, where that kernel has no tiling
    SKINNY = "skinny"


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a weight, and whether a norm comes before its product and SiLU after it."""

    name: str
    outputs: int
    inputs: int
    normed: bool = False
    gated: bool = False
    item_bytes: int = 2  # 1: 8-bit floats
    after_gated: bool = False  # the kernel before it quantizes its rows, if they are

    @property
    def num_bytes(self) -> int:
        return self.item_bytes * self.outputs * self.inputs


MODELS: dict[str, tuple[Shape, ...]] = {
    "Qwen3-0.6B": (
        Shape("qkv", 4096, 1024, normed=True),
        Shape("o", 1024, 2048),
        Shape("gate_up", 6144, 1024, normed=True, gated=True),
        Shape("down", 1024, 3072),
    ),
    "Llama-3.1-8B": (
        Shape("qkv", 6144, 4096, normed=True),
        Shape("o", 4096, 4096),
        Shape("gate_up", 28672, 4096, normed=True, gated=True),
        Shape("down", 4096, 14336, after_gated=True),
    ),
}
MODELS["Llama-3.1-8B-fp8"] = tuple(replace(shape, item_bytes=1) for shape in MODELS["Llama-3.1-8B"])
HEADS = {"Qwen3-0.6B": Shape("head", 151936, 1024), "Llama-3.1-8B": Shape("head", 128256, 4096)}
HEADS["Llama-3.1-8B-fp8"] = HEADS["Llama-3.1-8B"]
# Only to check that everything runs, in Triton's interpreter too.
MODELS["tiny"] = (
    Shape("qkv", 16, 32, normed=True),
    Shape("gate_up", 32, 32, normed=True, gated=True),
    Shape("gate_up fp8", 32, 32, normed=True, gated=True, item_bytes=1),
    Shape("down fp8", 16, 32, item_bytes=1, after_gated=True),
)
HEADS["tiny"] = Shape("head", 10, 32)


class Product:
    """A weight, and what a layer does before and after its product."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        self.linear = GpuLinear(torch.randn(shape.outputs, shape.inputs, dtype=torch.bfloat16))
        self.fits_few_rows = self.linear.few_rows.fits
        self.x, self.residual = torch.randn(2, num_rows, shape.inputs, dtype=torch.bfloat16)
        self.norm_weight = torch.ones(shape.inputs, dtype=torch.bfloat16)
        self.shape = shape

    def run(self, way: Way) -> object:
        is_skinny = way is Way.SKINNY
        self.linear.input_form = SkinnyGemm(self.x.shape[0]) if is_skinny else PLAIN
        self.linear.few_rows.fits = self.fits_few_rows and way is Way.FEW_ROWS
        multiply = self.linear.gated if self.shape.gated else self.linear
        if not self.shape.normed:
            return multiply(self.x)
        if is_skinny:
            return multiply(unnormed_rows(self.x, self.residual, self.norm_weight, 1e-6))
        return multiply(add_rms_norm(self.x, self.residual, self.norm_weight, 1e-6)[0])


class Fp8Product:
    """A weight of 8-bit floats, and what a layer does before and after its product."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        weight = quantize(torch.randn(shape.outputs, shape.inputs, dtype=torch.bfloat16), _ROWS)
        self.weight, self.scales = weight.values, weight.scales.flatten()
        self.linear = Fp8Linear(self.weight, self.scales, None, _ROWS)
        self.fits_few_rows = self.linear.few_rows is not None and self.linear.few_rows.fits
        self.x, self.residual = torch.randn(2, num_rows, shape.inputs, dtype=torch.bfloat16)
        self.norm_weight = torch.ones(shape.inputs, dtype=torch.bfloat16)
        self.quantized = quantize(self.x, _ROWS)
        self.shape = shape

    def run(self, way: Way) -> object:
        if way is Way.SKINNY:
            rows = unnormed_rows(self.x, self.residual, self.norm_weight, 1e-6) if self.shape.normed else self.x
            return skinny_fp8_linear(rows, self.weight, self.scales, None, _ROWS, gated=self.shape.gated)
        if self.linear.few_rows is not None:
            self.linear.few_rows.fits = self.fits_few_rows and way is Way.FEW_ROWS
        if self.shape.normed:
            quantized, _ = rms_norm_fp8(self.x, self.residual, self.norm_weight, 1e-6, _ROWS)
        else:
            quantized = self.quantized if self.shape.after_gated else quantize(self.x, _ROWS)
        return quantize(self.linear.gated(quantized, _ROWS), _ROWS) if self.shape.gated else self.linear(quantized)


def time_products(shapes: Sequence[Shape], num_rows: int) -> dict[Way, float]:
    """Seconds of all of `shapes` together, in their order."""
    num_bytes = sum(shape.num_bytes for shape in shapes)
    products = [
        Product(shape, num_rows) if shape.item_bytes == 2 else Fp8Product(shape, num_rows)
        for _ in range(num_copies(num_bytes))
        for shape in shapes
    ]
    seconds = {}
    for way in Way:
        for product in products[: len(shapes)]:
            product.run(way)  # compiles
        seconds[way] = time_each([partial(product.run, way) for product in products]) * len(shapes)
    return seconds


def time_model(model: str, all_rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    layer = MODELS[model]
    parts = {shape.name: (shape,) for shape in (*layer, HEADS[model])} | {"layer": layer}
    for num_rows, (name, shapes) in itertools.product(all_rows, parts.items()):
        seconds = time_products(shapes, num_rows)
        rate = sum(shape.num_bytes for shape in shapes) / seconds[Way.SKINNY]
        yield {
            "product": name,
            "rows": num_rows,
            "bytes a thread, warps": f"{skinny_gemm.THREAD_BYTES}, {skinny_gemm.WARPS_PER_MULTIPROCESSOR}",
            **{f"{way.value}, µs": round(each * 1e6, 1) for way, each in seconds.items()},
            "GB/s": round(rate / 1e9),
            "of the bandwidth": f"{rate / BANDWIDTH:.0%}",
        }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", choices=MODELS, default=["Qwen3-0.6B", "Llama-3.1-8B", "Llama-3.1-8B-fp8"]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--thread-bytes", type=int, nargs="+", default=[skinny_gemm.THREAD_BYTES])
    parser.add_argument("--warps", type=int, nargs="+", default=[skinny_gemm.WARPS_PER_MULTIPROCESSOR])
    parser.add_argument("--json", type=Path)
    return parser


def main(argv: Sequence[str]) -> None:
    arguments = parser().parse_args(argv)

    def time_tilings(model: str) -> Iterator[dict[str, Any]]:
        for thread_bytes, warps in itertools.product(arguments.thread_bytes, arguments.warps):
            skinny_gemm.THREAD_BYTES, skinny_gemm.WARPS_PER_MULTIPROCESSOR = thread_bytes, warps
            yield from time_model(model, arguments.rows)

    with torch.inference_mode(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        run_sweep(arguments.workloads, time_tilings, arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
