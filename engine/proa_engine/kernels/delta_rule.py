"""The gated delta rule of a mixed batch (Yang et al. 2024, arXiv 2412.06464): decodes first, then chunks of prompts.

On a GPU decodes are computed token by token and other rows in chunks, unless a token's bits must not depend on chunks.
"""

import torch

from proa_engine.kernels.delta_rule_chunk import delta_rule_chunk
from proa_engine.kernels.delta_rule_recurrent import delta_rule_recurrent
from proa_engine.kernels.delta_rule_reference import delta_rule_reference
from proa_engine.kernels.state_plan import StatePlan
from proa_engine.kernels.state_rows import StateRows


def gated_delta_rule(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cache: torch.Tensor,
    rows: StateRows,
    *,
    num_decodes: int,
    batch_invariant: bool,
    plan: StatePlan | None,
) -> torch.Tensor:
    """qkv [T, 2 * key heads * key_dim + heads * value_dim] -> [T, heads * value_dim], in qkv's type.

    Writes the states at the ends of segments to `cache` [slots, heads, value_dim, key_dim] float32. `gates` [T, 2 *
    heads] are each head's b, then each head's a; `a_log` and `dt_bias` are [heads] float32. Value heads share key heads
    in groups: value head h uses key head h // (heads / key heads). `plan` is set on a CPU.
    """
    if plan is not None:
        return delta_rule_reference(qkv, gates, a_log, dt_bias, cache, plan)
    _, num_heads, value_dim, _ = cache.shape
    num_rows = rows.read.shape[0]
    out = torch.empty(qkv.shape[0], num_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    inputs = qkv, gates, a_log, dt_bias, cache, out
    if batch_invariant:
        delta_rule_recurrent(*inputs, rows, num_rows, one_token=False)
        return out
    if num_decodes:
        delta_rule_recurrent(*inputs, rows, num_decodes, one_token=True)
    if num_decodes < num_rows:
        delta_rule_chunk(*inputs, rows, num_decodes)
    return out
