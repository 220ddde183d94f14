"""Paged attention over latent rows: every head attends to the same rows, whose first values are also the values.

With the up-projections absorbed into the queries and the outputs (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), this
is attention with one KV head.
"""

import torch

from proa_engine.kernels.attention_plan import ReferencePlan
from proa_engine.kernels.paged_attention import AttentionPlan
from proa_engine.kernels.paged_attention_reference import paged_attention_reference

GROUP = 16  # heads of a program


def head_groups(num_heads: int) -> int:
    """Programs for each row of a decode: what `plan_attention` takes as the number of KV heads on a GPU."""
    return -(-num_heads // GROUP)


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_decodes: int,
    scale: float,
) -> torch.Tensor:
    """query [T, heads, rank + rope_dim], cache [num_blocks, block_size, rank + rope_dim] -> [T, heads, rank]

    The other arguments describe the batch as those of `paged_attention` do.
    """
    assert isinstance(plan, ReferencePlan)
    rows = cache[:, None]
    return paged_attention_reference(query, rows, rows, plan, scale)[..., :rank]
