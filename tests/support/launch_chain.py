"""A chain of dependent launches, captured in a CUDA graph, against its kernels launched one by one."""

from collections.abc import Callable

import torch

from proa_engine.kernels.skinny_gemm import skinny_gemm_linear, unnormed_rows
from proa_engine.worker.decode_graphs import CudaGraphCapture


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

    expected = chain(torch.cuda.synchronize)
    (graph,) = CudaGraphCapture().capture(lambda: chain(lambda: None))
    for _ in range(num_replays):
        graph.replay()
        assert torch.equal(graph.result, expected)
