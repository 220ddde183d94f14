"""The gated delta rule token by token (Yang et al. 2024, arXiv 2412.06464, equation 10), on a CPU.

For each value head, with the state S [value_dim, key_dim]:
    S = decay * S;  S += beta * (v - S k) kᵀ;  out = S q
with k and q normalised to length 1, q scaled by key_dim^-0.5, beta = sigmoid(b) and
decay = exp(-exp(A_log) * softplus(a + dt_bias)).

Everything is computed in float32 by elementwise operations and sums over the last dimension, so a token's bits depend
neither on the other rows of the batch nor on how its row was cut into steps.
"""

import torch

from proa_engine.kernels.state_plan import StatePlan, read_states

NORM_EPS = 1e-6


def delta_rule_reference(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cache: torch.Tensor,
    plan: StatePlan,
) -> torch.Tensor:
    """Arguments as those of `gated_delta_rule`."""
    _, num_heads, value_dim, key_dim = cache.shape
    num_tokens = len(qkv)
    inputs = qkv[plan.token_order].float()
    value_width = num_heads * value_dim
    key_width = (qkv.shape[1] - value_width) // 2
    query, key, value = inputs.split((key_width, key_width, value_width), dim=1)
    group = num_heads // (key_width // key_dim)
    # [T, num_heads, 1, key_dim] for products with states
    query = normalize(query.view(num_tokens, -1, key_dim)).mul_(key_dim**-0.5).repeat_interleave(group, 1)[:, :, None]
    key = normalize(key.view(num_tokens, -1, key_dim)).repeat_interleave(group, 1)[:, :, None]
    value = value.view(num_tokens, num_heads, value_dim)
    beta, decay = step_gates(gates[plan.token_order].float(), a_log, dt_bias)
    beta, decay = beta[:, :, None], decay[:, :, None, None]

    states = read_states(cache, plan)
    products = torch.empty_like(states)
    out = torch.empty_like(value)
    start = 0
    for step, num_rows in enumerate(plan.row_counts):
        tokens = slice(start, start + num_rows)
        start += num_rows
        state, product = states[:num_rows], products[:num_rows]
        state.mul_(decay[tokens])
        known = torch.mul(state, key[tokens], out=product).sum(-1)
        change = (value[tokens] - known).mul_(beta[tokens])
        state.add_(torch.mul(change[..., None], key[tokens], out=product))
        torch.sum(torch.mul(state, query[tokens], out=product), -1, out=out[tokens])
        cut = plan.cuts.get(step)
        if cut is not None:
            cut.write(states, cache)
    result = torch.empty(num_tokens, value_width, dtype=qkv.dtype)
    result[plan.token_order] = out.view(num_tokens, value_width).to(qkv.dtype)
    return result


def normalize(x: torch.Tensor) -> torch.Tensor:
    """x [..., N] float32 scaled to length 1 over the last dimension."""
    return x * (x * x).sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()


def step_gates(gates: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gates [T, 2 * heads] float32, b then a -> beta and decay, [T, heads] each.

    Computed with exp and log1p, because the bits of `sigmoid` and `softplus` on a CPU depend on where each thread's
    share of the batch begins.
    """
    b, a = gates.chunk(2, dim=1)
    shifted = a + dt_bias
    softplus = shifted.clamp(min=0) + shifted.abs().neg_().exp_().log1p_()
    return b.neg().exp_().add_(1).reciprocal_(), softplus.mul_(-a_log.exp()).exp_()
