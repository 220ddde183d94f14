"""The state space of Mamba2 in a mixed batch (Dao and Gu 2024, arXiv 2405.21060): decodes and rows with drafts first,
then chunks of prompts.
"""

import torch

from proa_engine.kernels.states.ssd_recurrent import SsdWeights, ssd_recurrent, ssd_reference
from proa_engine.kernels.states.state_rows import NoPendingInputs, PendingInputs, StatePlan, StateRows


def ssd(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    weights: SsdWeights,
    cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: StateRows,
    *,
    pending: PendingInputs | NoPendingInputs,
    num_decodes: int,
    batch_invariant: bool,
    plan: StatePlan | None,
) -> torch.Tensor:
    """xbc [T, heads * head_dim + 2 * groups * state_size] -> [T, heads * head_dim], in xbc's type.

    `xbc` are the heads' x, then the groups' B, then their C. Writes the states at the ends of segments to `cache`
    [slots, heads, head_dim, state_size] float32. `dt` [T, heads]. Head h uses group h // (heads / groups). `pending`
    belongs to `rows.replay`; `plan` is set on a CPU.
    """
    if plan is not None:
        return ssd_reference(xbc, dt, weights, cache, pending, plan)
    _, num_heads, head_dim, _ = cache.shape
    num_rows, replay = rows.read.shape[0], rows.replay
    out = torch.empty(xbc.shape[0], num_heads * head_dim, dtype=xbc.dtype, device=xbc.device)
    inputs = xbc, dt, weights, cache, out, rows, query_start_loc
    num_first = max(replay.num_rows, 0 if batch_invariant else num_decodes)
    if num_first:
        ssd_recurrent(*inputs, 0, num_first, one_token=not replay.width, replay=replay, pending=pending)
    if num_rows > num_first:
        ssd_recurrent(*inputs, num_first, num_rows - num_first, one_token=False)
    return out
