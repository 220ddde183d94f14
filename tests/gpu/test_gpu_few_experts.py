"""Experts of few (token, expert) pairs on a GPU: the sums do not depend on which program ends last, nor on a graph."""

from collections.abc import Callable

import pytest
import torch

from proa_engine.kernels.experts.moe import ExpertMatrices, FusedExperts, LoopedExperts
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.experts.moe_route import Routing, route
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.products.skinny_gemm import skinny_gemm_linear, unnormed_rows
from proa_engine.step.decode_graphs import CudaGraphCapture
from support.quantized_cases import expert_case, routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@torch.inference_mode()  # as engines capture
def test_a_captured_layer_equals_itself_for_other_experts_in_every_replay(tokens: int) -> None:
    torch.manual_seed(0)
    case = expert_case(tokens, hidden=2048, inner=768, experts=128, k=8, dtype=torch.bfloat16)
    fused = FusedExperts(ExpertMatrices(case.gate_up.cuda()), ExpertMatrices(case.down.cuda()))
    x, weights, experts = (each.cuda() for each in (case.x, case.weights, case.experts))
    (graph,) = CudaGraphCapture().capture(lambda: fused(x, weights, experts))
    for _ in range(100):
        experts.copy_(routing(tokens, 8, 128))
        graph.replay()
        again = fused(x, weights, experts)
        torch.cuda.synchronize()
        assert torch.equal(graph.result, again)


@pytest.mark.parametrize("tokens", [1, 2])
@torch.inference_mode()
def test_a_captured_chain_of_layers_equals_its_kernels_launched_one_by_one(tokens: int) -> None:
    """The second product reads the choice of experts, and weights, before the first has ended."""
    torch.manual_seed(0)
    router, norm_weight = torch.randn(128, 2048).bfloat16().cuda(), torch.ones(2048).bfloat16().cuda()
    case = expert_case(tokens, hidden=2048, inner=768, experts=128, k=8, dtype=torch.bfloat16)
    fused = FusedExperts(ExpertMatrices(case.gate_up.cuda()), ExpertMatrices(case.down.cuda()))
    start = case.x.cuda()

    def chain(after_each: Callable[[], None]) -> torch.Tensor:
        x, residual = start, torch.zeros_like(start)
        for _ in range(12):
            rows = unnormed_rows(x, residual, norm_weight, 1e-6).keeping_norm()
            logits, residual = skinny_gemm_linear(rows, router), rows.total
            after_each()
            weights, experts = route(logits, Routing(8, normalize=True))
            after_each()
            assert rows.normed is not None
            x = fused(rows.normed, weights, experts)
            after_each()
        return x

    expected = chain(torch.cuda.synchronize)
    (graph,) = CudaGraphCapture().capture(lambda: chain(lambda: None))
    for _ in range(200):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(graph.result, expected)


@pytest.mark.parametrize("tokens", [1, 8])
def test_ranks_sum_their_own_experts(tokens: int) -> None:
    torch.manual_seed(0)
    case = expert_case(tokens, hidden=512, inner=256, experts=32, k=8, dtype=torch.bfloat16)
    arguments = [each.cuda() for each in (case.x, case.weights, case.experts % 24)]
    total = torch.zeros(tokens, 512, device="cuda")
    for first in (0, 8, 16, 24):
        part = slice(first, first + 8)
        matrices = ExpertMatrices(case.gate_up[part].cuda()), ExpertMatrices(case.down[part].cuda())
        total += FusedExperts(*matrices, held=ExpertRange(first, 8, 32))(*arguments)
    looped = LoopedExperts([Linear(w) for w in case.gate_up], [Linear(w) for w in case.down])
    expected = looped(case.x, case.weights, case.experts % 24).float()
    assert (total.cpu() - expected).abs().mean() / expected.abs().mean() < 0.02
