"""Matrix products of real models on a GPU, alone: microseconds, and the share of the device's bandwidth that reading
the weights takes of them.

PYTHONPATH=tests python -m benchmarks.kernels.products --rows 1 8 64 256 2048 --json products.json

Weights come in enough copies that none is found in the L2 cache; each figure is of one product within a CUDA graph.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks.kernels.sweep import BANDWIDTH, num_copies, time_each
from proa_engine.kernels.experts import moe
from proa_engine.kernels.experts.moe import FusedExperts
from proa_engine.kernels.experts.moe_few import MAX_PAIRS
from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows, quantize
from proa_engine.kernels.int8 import Int8Form
from proa_engine.kernels.products.fp8_linear import Fp8BlockLinear, Fp8Linear
from proa_engine.kernels.products.gpu_linear import GpuLinear
from proa_engine.kernels.products.int8_linear import Int8Linear
from proa_engine.kernels.products.int_linear import IntLinear
from support.kernels.experts import weights_in
from support.quantized_cases import ExpertCase, expert_case, in_integers, int_case, matrix_in_blocks

LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
QWEN3_30B = {"hidden": 2048, "inner": 768, "experts": 128, "k": 8}
Product = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class Figure:
    product: str
    form: str
    rows: int
    microseconds: float
    bandwidth_share: float  # of the weights that are read


def matrices(shape: tuple[int, int]) -> Iterator[tuple[str, float, Callable[[], Product]]]:
    """Form, bytes of the weight, and what makes a new copy of the product."""
    outputs, inputs = shape
    rows, groups = Fp8Form(), Fp8Form(group=128)

    def floats() -> Product:
        return GpuLinear(torch.randn(outputs, inputs, dtype=torch.bfloat16))

    def by_row() -> Product:
        weight = quantize(torch.randn(outputs, inputs, dtype=torch.bfloat16), rows)
        return taking(rows, Fp8Linear(weight.values, weight.scales.flatten(), None, rows))

    def by_block() -> Product:
        return taking(groups, Fp8BlockLinear(*matrix_in_blocks(outputs, inputs), None, groups))

    def in_int8() -> Product:
        """With the quantization of its input, a launch of its own."""
        return Int8Linear(*in_integers(torch.randn(outputs, inputs)), None, Int8Form())

    def with_int_weights(bits: int) -> Product:
        return IntLinear(int_case(outputs, inputs, bits=bits, dtype=torch.bfloat16), None)

    yield "bfloat16", 2.0 * outputs * inputs, floats
    yield "fp8 by row", 1.0 * outputs * inputs, by_row
    yield "fp8 by block", 1.0 * outputs * inputs, by_block
    yield "int8", 1.0 * outputs * inputs, in_int8
    yield "int4", 0.5 * outputs * inputs, partial(with_int_weights, 4)
    yield "int8 weights", 1.0 * outputs * inputs, partial(with_int_weights, 8)


def taking(form: Fp8Form, product: Callable[[QuantizedRows], object]) -> Product:
    """The product alone: its input is quantized once."""
    known: list[tuple[torch.Tensor, QuantizedRows]] = []

    def run(x: torch.Tensor) -> object:
        if not known or known[-1][0] is not x:
            known[:] = [(x, quantize(x, form))]
        return product(known[-1][1])

    return run


def time_matrices(rows: list[int]) -> Iterator[Figure]:
    for name, shape in LLAMA_8B.items():
        for form, num_bytes, make in matrices(shape):
            products = [make() for _ in range(num_copies(num_bytes))]
            for num_rows in rows:
                x = torch.randn(num_rows, shape[1], dtype=torch.bfloat16)
                for product in products:
                    product(x)  # compiles, and quantizes x
                seconds = time_each([partial(product, x) for product in products])
                yield Figure(name, form, num_rows, seconds * 1e6, num_bytes / BANDWIDTH / seconds)


def time_experts(rows: list[int]) -> Iterator[Figure]:
    """A layer's weights are more than the cache keeps, unless few experts are used. Few pairs also as more are
    computed, sorted by expert."""
    case = expert_case(max(rows), dtype=torch.bfloat16, **QWEN3_30B)
    for form, layer, expert_bytes in expert_layers(case):
        for num_tokens in rows:
            arguments = [each[:num_tokens] for each in (case.x, case.weights, case.experts)]
            num_bytes = len(arguments[2].unique()) * expert_bytes
            names = {"experts": MAX_PAIRS}
            if arguments[2].numel() <= MAX_PAIRS:
                names["experts, sorted"] = 0
            for name, max_pairs in names.items():
                with mock.patch.object(moe, "MAX_PAIRS", max_pairs):
                    layer(*arguments)
                    seconds = time_each([partial(layer, *arguments)])
                yield Figure(name, form, num_tokens, seconds * 1e6, num_bytes / BANDWIDTH / seconds)


def expert_layers(case: ExpertCase) -> Iterator[tuple[str, FusedExperts, int]]:
    """By form of the weights: its name, the layer, and the bytes of one expert's weights."""
    numbers = case.gate_up[0].numel() + case.down[0].numel()
    for name, form, bits in (
        ("bfloat16", "float", 16),
        ("fp8 by row", "rows", 8),
        ("fp8 by block", "groups", 8),
        ("int8", "int8", 8),
        ("int4", "4 bits in 128", 4),
    ):
        first, second = (weights_in(form, each) for each in (case.gate_up, case.down))
        yield name, FusedExperts(first.matrices(), second.matrices(), first.form), numbers * bits // 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256, 2048, 8192])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = []
    with torch.inference_mode(), torch.device("cuda"):
        for time_all in (time_matrices, time_experts):
            for figure in time_all(arguments.rows):
                figures.append(asdict(figure))
                print(
                    f"{figure.product:15} {figure.form:13} {figure.rows:5} rows {figure.microseconds:9.1f} us "
                    f"{figure.bandwidth_share:6.1%} of the bandwidth",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
