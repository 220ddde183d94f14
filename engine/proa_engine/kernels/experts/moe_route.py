"""Router of a mixture of experts: the experts of each token, and their weights, from its router logits.

One program for each token, which holds all experts in one tile. Among equal values the lower expert number comes first.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from proa_engine.kernels.float_order import float_of, order_of
from proa_engine.kernels.launch import INTERPRETED, begin, kernel, next_power_of_2

SMALLEST_SUM = 1e-20  # added before a division by the sum of weights, which can be zero with the sigmoid


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen and weighted.

    With `normalize`, softmax weights are those of a softmax over the chosen logits alone. Limits by group as in
    DeepSeek-V2 (`group_best` 1) and DeepSeek-V3 (2).
    """

    num_chosen: int
    normalize: bool  # scale each token's weights to sum to 1, before `scale` is applied
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # the weights, of which the largest are chosen
    num_groups: int = 1  # equal runs of experts
    num_chosen_groups: int = 1  # a token's experts are of its best so many groups
    group_best: Literal[1, 2] = 2  # a group's score is the sum of its best so many experts'
    scale: float = 1.0  # factor of the weights

    def check(self, num_experts: int) -> None:
        """Raise ValueError if `num_experts` experts cannot be routed so."""
        size = num_experts // self.num_groups
        if num_experts % self.num_groups or size < self.group_best or size * self.num_chosen_groups < self.num_chosen:
            raise ValueError(
                f"{self.num_chosen} of {num_experts} experts cannot be chosen from {self.num_chosen_groups} "
                f"of {self.num_groups} groups"
            )

    def constants(self, num_experts: int, correction: torch.Tensor | None) -> dict[str, object]:
        """Those of `choose_experts`."""
        return {
            "K": self.num_chosen,
            "NORMALIZE": self.normalize,
            "SIGMOID": self.scoring == "sigmoid",
            "CORRECTED": correction is not None,
            "GROUPS": self.num_groups,
            "CHOSEN_GROUPS": self.num_chosen_groups,
            "GROUP_BEST": self.group_best,
            "SCALE": self.scale,
            "BLOCK_GROUPS": next_power_of_2(self.num_groups),
            "BLOCK_SIZE": next_power_of_2(num_experts // self.num_groups),
            "BLOCK_K": next_power_of_2(self.num_chosen),
        }


def route(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, experts] -> weights [T, k] float32 and experts [T, k] int32.

    `correction` [experts] is added to the scores for the choice, not to the weights.
    """
    if logits.is_cpu and not INTERPRETED:
        return route_reference(logits, routing, correction)
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    weights, experts = empty_choice(num_tokens, routing, logits.device)
    route_kernel[(num_tokens,)](
        logits,
        correction,
        weights,
        experts,
        num_experts,
        logits.stride(0),
        **routing.constants(num_experts, correction),
        num_warps=1,
    )
    return weights, experts


def empty_choice(num_tokens: int, routing: Routing, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of `route`."""
    shape = num_tokens, routing.num_chosen
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def route_reference(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if routing.scoring == "softmax":
        scores = logits.float().softmax(-1)
    else:  # with exp, for the reason given in `activate_and_mul_reference`
        scores = logits.float().neg().exp_().add_(1).reciprocal_()
    choice = scores if correction is None else scores + correction.float()
    if routing.num_groups > 1:
        grouped = choice.unflatten(-1, (routing.num_groups, -1))
        best_groups = grouped.topk(routing.group_best, dim=-1).values.sum(-1).topk(routing.num_chosen_groups).indices
        is_open = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter_(-1, best_groups, True)
        choice = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
    experts = choice.topk(routing.num_chosen, dim=-1).indices
    weights = scores.gather(-1, experts)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return weights * routing.scale, experts.to(torch.int32)


@kernel
def route_kernel(
    logits_ptr,  # [tokens, num_experts]
    correction_ptr,  # [num_experts], or nothing
    weights_ptr,  # [tokens, K]
    experts_ptr,  # [tokens, K]
    num_experts,
    stride_token,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    choose_experts(
        logits_ptr,
        correction_ptr,
        weights_ptr,
        experts_ptr,
        tl.program_id(0) + tl.arange(0, 1),
        tl.num_programs(0),
        num_experts,
        stride_token,
        K,
        NORMALIZE,
        SIGMOID,
        CORRECTED,
        GROUPS,
        CHOSEN_GROUPS,
        GROUP_BEST,
        SCALE,
        BLOCK_GROUPS,
        BLOCK_SIZE,
        BLOCK_K,
    )


@triton.jit
def choose_experts(
    logits_ptr,  # [num_tokens, num_experts]; may have been written by other programs of the same kernel
    correction_ptr,  # [num_experts], or nothing
    weights_ptr,  # [num_tokens, K]
    experts_ptr,  # [num_tokens, K]
    token,  # [T]
    num_tokens,
    num_experts,
    stride_token,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # of a group
    BLOCK_K: tl.constexpr,
):
    """Choose the experts of these tokens; see `Routing`."""
    BLOCK: tl.constexpr = BLOCK_GROUPS * BLOCK_SIZE
    TAKEN: tl.constexpr = -(2**31)  # below the order of -inf
    token = token.to(tl.int64)[:, None]
    token_mask = token < num_tokens
    expert = tl.arange(0, BLOCK)[None, :]
    mask = expert < num_experts
    if GROUPS > 1:  # each group is padded to BLOCK_SIZE
        size = num_experts // GROUPS
        mask = (expert % BLOCK_SIZE < size) & (expert // BLOCK_SIZE < GROUPS)
        expert = expert // BLOCK_SIZE * size + expert % BLOCK_SIZE
    # [T, BLOCK]. Tokens past the end have logits of 0.
    place = logits_ptr + token * stride_token + expert
    logits = tl.load(place, mask=token_mask & mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    logits = tl.where(mask, logits, float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = scores / tl.sum(scores, axis=1)[:, None]
    choice = scores
    if CORRECTED:
        choice += tl.load(correction_ptr + expert, mask=mask, other=0.0).to(tl.float32)
    choice = tl.where(mask, choice, float("-inf"))
    if GROUPS > 1:
        choice = _only_best_groups(choice, CHOSEN_GROUPS, GROUP_BEST, BLOCK_GROUPS, BLOCK_SIZE)
    # A warp finds the largest of integers in one instruction.
    order = order_of(choice, 0)
    slot = tl.arange(0, BLOCK_K)[None, :]
    weights = tl.zeros([token.shape[0], BLOCK_K], tl.float32)
    chosen = tl.zeros([token.shape[0], BLOCK_K], tl.int32)
    for i in tl.static_range(K):
        best = tl.max(order, axis=1)[:, None]
        first = tl.min(tl.where(order == best, expert, num_experts), axis=1)[:, None]
        if CORRECTED:
            weight = tl.sum(tl.where(mask & (expert == first), scores, 0.0), axis=1)[:, None]
        else:
            weight = float_of(best, 0)
        weights = tl.where(slot == i, weight, weights)
        chosen = tl.where(slot == i, first, chosen)
        order = tl.where(expert == first, TAKEN, order)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, axis=1)[:, None] + 1e-20)
    out_mask = token_mask & (slot < K)
    tl.store(weights_ptr + token * K + slot, weights * SCALE, mask=out_mask)
    tl.store(experts_ptr + token * K + slot, chosen, mask=out_mask)


@triton.jit
def _only_best_groups(
    choice,  # [T, BLOCK_GROUPS * BLOCK_SIZE]
    CHOSEN: tl.constexpr,
    BEST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Set the scores of all but the best groups' experts to -inf."""
    grouped = tl.reshape(choice, (choice.shape[0], BLOCK_GROUPS, BLOCK_SIZE))
    totals = tl.max(grouped, axis=2)
    if BEST == 2:
        place = tl.arange(0, BLOCK_SIZE)[None, None, :]
        first = tl.min(tl.where(grouped == totals[:, :, None], place, BLOCK_SIZE), axis=2)
        totals += tl.max(tl.where(place == first[:, :, None], float("-inf"), grouped), axis=2)
    group = tl.arange(0, BLOCK_GROUPS)[None, :]
    is_open = totals < float("-inf")  # of no group
    for _ in tl.static_range(CHOSEN):
        best = tl.max(totals, axis=1)[:, None]
        first = tl.min(tl.where(totals == best, group, BLOCK_GROUPS), axis=1)[:, None]
        is_open = is_open | (group == first)
        totals = tl.where(group == first, float("-inf"), totals)
    return tl.reshape(tl.where(is_open[:, :, None], grouped, float("-inf")), choice.shape)
