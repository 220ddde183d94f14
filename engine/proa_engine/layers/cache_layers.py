"""What a model's layers keep for the tokens before: each model declares one `CacheLayer` for each of its layers.

Sizes are those of one rank. Models only declare; the worker decides where each layer's memory lies.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeyValueLayer:
    """Keys and values of every token, or of the last `window` tokens, the current one included."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """Keys and values of the audio that a request reads, `num_tokens` at most, which are written once."""

    num_kv_heads: int
    head_dim: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """One row of `rank + rope_dim` values for every token (multi-head latent attention): the same on every rank, or a
    share of each block's tokens on each of `num_shares` ranks."""

    rank: int
    rope_dim: int
    num_shares: int = 1


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A state of fixed size for every request: the shape and the type of each of its parts.

    `inputs` are the values of a token from which the layer computes states: the width and the type of each. With drafts
    the layer keeps those of a step's tokens, see `Replay`.
    """

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    inputs: tuple[tuple[int, torch.dtype], ...] = ()


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """Reads what `layer`, an earlier layer, has stored, and stores nothing."""

    layer: int


CacheLayer = KeyValueLayer | CrossLayer | LatentLayer | StateLayer | SharedLayer


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's memory, as a step's call gets it.

    `tensors`, by the kind of layer: keys and values, each [num_blocks, kv_heads, block_size, head_dim]; latent rows
    [num_blocks, block_size, rank + rope_dim]; or the parts of states, each [num_state_slots, *shape]. `table` is the
    index of the block table in `AttentionMetadata.tables`; states have none and leave it 0, and that of cross-attention
    is behind these (`AttentionMetadata.audio`). `kept` are the inputs of a
    layer with states, each [max_num_seqs, tokens, width]; without drafts of no tokens.
    """

    table: int
    tensors: tuple[Tensor, ...]
    kept: tuple[Tensor, ...] = ()
    layout: tuple[object, ...] = field(init=False)  # equal for layers with equal places of their tokens

    def __post_init__(self) -> None:
        first = self.tensors[0]
        object.__setattr__(self, "layout", (self.table, first.shape, first.stride(0)))
