"""A chain of dependent launches, captured in a CUDA graph, against its kernels launched one by one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from proa_engine.kernels.fp8 import Fp8Form, quantize
from proa_engine.kernels.products.fp8_linear import Fp8Linear
from proa_engine.kernels.products.gpu_linear import GpuLinear
from proa_engine.kernels.products.skinny_gemm import skinny_gemm_linear, unnormed_rows
from proa_engine.kernels.rms_norm import add_rms_norm, rms_norm_fp8
from proa_engine.step.decode_graphs import CudaGraphCapture


@torch.inference_mode()  # as engines capture: the generator's state is theirs too
def check_captured_chain(hidden: int, inner: int, *, num_layers: int, num_replays: int) -> None:
    """Each kernel starts before the previous one has ended; memory is reused, as in a CUDA graph."""
    layers = [
        (
            torch.randn(hidden, device="cuda").bfloat16(),
            (torch.randn(2 * inner, hidden, device="cuda") / hidden**0.5).bfloat16(),
            (torch.randn(hidden, inner, device="cuda") / inner**0.5).bfloat16(),
        )
        for _ in range(num_layers)
    ]
    start = torch.randn(1, hidden, device="cuda").bfloat16()

    def chain(after_each: Callable[[], None]) -> torch.Tensor:
        x, residual = start, None
        for norm_weight, gate_up, down in layers:
            rows = unnormed_rows(x, residual, norm_weight, 1e-6)
            inner_rows = skinny_gemm_linear(rows, gate_up, gated=True)
            after_each()
            x, residual = skinny_gemm_linear(inner_rows, down), rows.total
            after_each()
        return x

    _check_replays(chain, num_replays)


@torch.inference_mode()
def check_captured_chain_of_few_rows(
    hidden: int, inner: int, num_rows: int, *, is_fp8: bool, num_layers: int, num_replays: int
) -> None:
    """The same of products of few rows, with norms between them. Tiles of some are shared by several programs."""
    form = Fp8Form()

    def linear(outputs: int, inputs: int) -> GpuLinear | Fp8Linear:
        weight = (torch.randn(outputs, inputs, device="cuda") / inputs**0.5).bfloat16()
        if not is_fp8:
            return GpuLinear(weight)
        rows = quantize(weight, form)
        return Fp8Linear(rows.values, rows.scales.flatten(), None, form)

    layers = [
        (torch.randn(hidden, device="cuda").bfloat16(), linear(2 * inner, hidden), linear(hidden, inner))
        for _ in range(num_layers)
    ]
    start, first = torch.randn(2, num_rows, hidden, device="cuda").bfloat16()
    norm: Any = partial(rms_norm_fp8, form=form) if is_fp8 else add_rms_norm

    def chain(after_each: Callable[[], None]) -> torch.Tensor:
        x: torch.Tensor = start.clone()  # norms may overwrite what they read
        residual = first.clone()
        for norm_weight, gate_up, down in layers:
            rows, residual = norm(x, residual, norm_weight, 1e-6)
            after_each()
            hidden_rows = gate_up.gated(rows)
            after_each()
            x = down(hidden_rows)
            after_each()
        return x

    _check_replays(chain, num_replays)


def _check_replays(chain: Callable[[Callable[[], None]], torch.Tensor], num_replays: int) -> None:
    expected = chain(torch.cuda.synchronize)
    (graph,) = CudaGraphCapture().capture(lambda: chain(lambda: None))
    for _ in range(num_replays):
        graph.replay()
        assert torch.equal(graph.result, expected)
