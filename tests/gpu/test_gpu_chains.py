"""Captured chains of dependent launches on a GPU: what they compute equals their kernels launched one by one, whichever
program ends last."""

from collections.abc import Callable

import pytest
import torch

from proa_engine.kernels.experts.moe import ExpertMatrices, FusedExperts
from proa_engine.kernels.experts.moe_route import Routing, route
from proa_engine.kernels.experts.moe_router import GpuRouter
from proa_engine.kernels.products.skinny_gemm import skinny_gemm_linear, unnormed_rows
from proa_engine.step.decode_graphs import CudaGraphCapture
from support.launch_chain import check_captured_chain, check_captured_chain_of_few_rows
from support.quantized_cases import expert_case, routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (4096, 14336)])
def test_a_chain_of_skinny_products_equals_its_kernels(hidden: int, inner: int) -> None:
    torch.manual_seed(0)
    check_captured_chain(hidden, inner, num_layers=6, num_replays=200)


@pytest.mark.parametrize("is_fp8", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("num_rows", [3, 32, 64])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (4096, 14336)])
def test_a_chain_of_products_of_few_rows_equals_its_kernels(
    hidden: int, inner: int, num_rows: int, is_fp8: bool
) -> None:
    check_captured_chain_of_few_rows(hidden, inner, num_rows, is_fp8=is_fp8, num_layers=6, num_replays=100)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@torch.inference_mode()  # as engines capture
def test_a_layer_of_experts_equals_itself_for_others_in_every_replay(tokens: int) -> None:
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
def test_a_chain_of_layers_of_experts_equals_its_kernels(tokens: int) -> None:
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


@pytest.mark.parametrize("tokens", [3, 8, 64, 128])
@torch.inference_mode()
def test_a_chain_of_routers_and_experts_equals_its_kernels(tokens: int) -> None:
    """The routers' programs read their weights before the experts before them have ended, and count each other."""
    torch.manual_seed(0)
    weights = torch.randn(12, 128, 2048).bfloat16().cuda() / 2048**0.5
    routers = [GpuRouter(weight, None, Routing(8, normalize=True), None) for weight in weights]
    norm_weight = torch.ones(2048).bfloat16().cuda()
    case = expert_case(tokens, hidden=2048, inner=768, experts=128, k=8, dtype=torch.bfloat16)
    fused = FusedExperts(ExpertMatrices(case.gate_up.cuda()), ExpertMatrices(case.down.cuda()))
    start = case.x.cuda()

    def chain(after_each: Callable[[], None]) -> torch.Tensor:
        x, residual = start, torch.zeros_like(start)
        for router in routers:
            rows = unnormed_rows(x, residual, norm_weight, 1e-6)
            choice, residual = router(rows), rows.total
            after_each()
            x = fused(*choice)
            after_each()
        return x

    expected = chain(torch.cuda.synchronize)
    (graph,) = CudaGraphCapture().capture(lambda: chain(lambda: None))
    for _ in range(100):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(graph.result, expected)
    assert not any(router.arrived.any() for router in routers)
