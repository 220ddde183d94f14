"""Router of a mixture of experts: the k largest probabilities of the softmax over a token's router logits.

One program for each token, which holds all experts in one tile. Among equal values the lower expert number comes first.
"""

import torch
import triton.language as tl

from proa_engine.kernels.launch import kernel
from proa_engine.kernels.sizes import next_power_of_2


def route(logits: torch.Tensor, k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, experts] -> weights [T, k] float32, which sum to 1 if `normalize`, and experts [T, k] int32."""
    if logits.is_cpu:
        return route_reference(logits, k, normalize=normalize)
    return _route_triton(logits, k, normalize=normalize)


def route_reference(logits: torch.Tensor, k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = logits.float().softmax(-1).topk(k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.to(torch.int32)


def _route_triton(logits: torch.Tensor, k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    weights = torch.empty((num_tokens, k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((num_tokens, k), dtype=torch.int32, device=logits.device)
    route_kernel[(num_tokens,)](
        logits,
        weights,
        experts,
        num_experts,
        logits.stride(0),
        K=k,
        NORMALIZE=normalize,
        BLOCK=next_power_of_2(num_experts),
        BLOCK_K=next_power_of_2(k),
        num_warps=1,
    )
    return weights, experts


@kernel
def route_kernel(
    logits_ptr,  # [tokens, num_experts]
    weights_ptr,  # [tokens, K]
    experts_ptr,  # [tokens, K]
    num_experts,
    stride_token,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    mask = expert < num_experts
    logits = tl.load(logits_ptr + token * stride_token + expert, mask=mask, other=float("-inf")).to(tl.float32)
    scores = tl.exp(logits - tl.max(logits, axis=0))
    scores = tl.where(mask, scores / tl.sum(scores, axis=0), -1.0)
    slot = tl.arange(0, BLOCK_K)
    weights = tl.zeros([BLOCK_K], tl.float32)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for i in tl.static_range(K):
        best = tl.max(scores, axis=0)
        first = tl.min(tl.where(scores == best, expert, BLOCK), axis=0)
        weights = tl.where(slot == i, best, weights)
        chosen = tl.where(slot == i, first, chosen)
        scores = tl.where(expert == first, -1.0, scores)
    if NORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + token * K + slot, weights, mask=slot < K)
    tl.store(experts_ptr + token * K + slot, chosen, mask=slot < K)
