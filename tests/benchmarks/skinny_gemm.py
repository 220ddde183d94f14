"""Products of few rows on a GPU, with the norm before and the SiLU after them: the kernel for few rows beside cuBLAS
and the kernels around it. From this table comes the rule of which rows are few.

    PYTHONPATH=tests python tests/benchmarks/skinny_gemm.py --rows 1 2 4 8 --json skinny_gemm.json

Weights come in enough copies that none is found in the L2 cache; each figure is of one product within a CUDA graph. The
last line of a model is all products of a layer, one after the other. `--thread-bytes` and `--warps` try other tilings.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from products import BANDWIDTH, COLD_BYTES, time_each

from proa_engine.kernels import skinny_gemm
from proa_engine.kernels.gpu_linear import GpuLinear
from proa_engine.kernels.rms_norm import add_rms_norm
from proa_engine.kernels.skinny_gemm import SkinnyGemm, unnormed_rows


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a weight, and whether a norm comes before its product and SiLU after it."""

    name: str
    outputs: int
    inputs: int
    normed: bool = False
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        return 2 * self.outputs * self.inputs


MODELS = {
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
        Shape("down", 4096, 14336),
    ),
}
HEADS = {"Qwen3-0.6B": Shape("head", 151936, 1024), "Llama-3.1-8B": Shape("head", 128256, 4096)}


@dataclass(frozen=True, slots=True)
class Figure:
    model: str
    product: str
    rows: int
    cublas: float  # microseconds, with the kernels around it
    skinny_gemm: float
    gigabytes_per_second: float  # of the weight, by the kernel for few rows
    bandwidth_share: float
    thread_bytes: int
    warps: int


class Product:
    """A weight, and what a layer does before and after its product."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        self.linear = GpuLinear(torch.randn(shape.outputs, shape.inputs, dtype=torch.bfloat16))
        self.x, self.residual = torch.randn(2, num_rows, shape.inputs, dtype=torch.bfloat16)
        self.norm_weight = torch.ones(shape.inputs, dtype=torch.bfloat16)
        self.shape = shape

    def run(self, form: SkinnyGemm | None) -> torch.Tensor:
        self.linear.input_form = form
        multiply = self.linear.gated if self.shape.gated else self.linear
        if not self.shape.normed:
            return multiply(self.x)
        if form is not None:
            return multiply(unnormed_rows(self.x, self.residual, self.norm_weight, 1e-6))
        return multiply(add_rms_norm(self.x, self.residual, self.norm_weight, 1e-6)[0])


def time_products(name: str, shapes: tuple[Shape, ...], num_rows: int, model: str) -> Figure:
    """Of all of `shapes` together, in their order."""
    num_bytes = sum(shape.num_bytes for shape in shapes)
    copies = int(COLD_BYTES / num_bytes) + 1
    products = [Product(shape, num_rows) for _ in range(copies) for shape in shapes]
    seconds = []
    for form in (None, SkinnyGemm(num_rows)):
        for product in products[: len(shapes)]:
            product.run(form)  # compiles
        seconds.append(time_each([partial(product.run, form) for product in products]) * len(shapes))
    cublas, ours = seconds
    rate = num_bytes / ours
    return Figure(
        model,
        name,
        num_rows,
        cublas * 1e6,
        ours * 1e6,
        rate / 1e9,
        rate / BANDWIDTH,
        skinny_gemm.THREAD_BYTES,
        skinny_gemm.WARPS_PER_MULTIPROCESSOR,
    )


def time_model(model: str, num_rows: int) -> Iterator[Figure]:
    for shape in (*MODELS[model], HEADS[model]):
        yield time_products(shape.name, (shape,), num_rows, model)
    yield time_products("layer", MODELS[model], num_rows, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--thread-bytes", type=int, nargs="+", default=[skinny_gemm.THREAD_BYTES])
    parser.add_argument("--warps", type=int, nargs="+", default=[skinny_gemm.WARPS_PER_MULTIPROCESSOR])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = []
    print("| model | product | rows | bytes a thread, warps | cuBLAS, µs | few rows, µs | GB/s | of the bandwidth |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    with torch.inference_mode(), torch.device("cuda"):
        settings = itertools.product(MODELS, arguments.thread_bytes, arguments.warps, arguments.rows)
        for model, thread_bytes, warps, num_rows in settings:
            skinny_gemm.THREAD_BYTES, skinny_gemm.WARPS_PER_MULTIPROCESSOR = thread_bytes, warps
            for figure in time_model(model, num_rows):
                figures.append(asdict(figure))
                print(
                    f"| {figure.model} | {figure.product} | {figure.rows} | {figure.thread_bytes}, {figure.warps} "
                    f"| {figure.cublas:.1f} | {figure.skinny_gemm:.1f} | {figure.gigabytes_per_second:,.0f} "
                    f"| {figure.bandwidth_share:.0%} |",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
