"""A step's batch as attention sees it: `AttentionMetadata`, and what all layers compute of it once, `AttentionStep`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

import torch

from proa_engine.kernels.attention.decode_plan import DecodePlan, plan_decodes
from proa_engine.kernels.attention.latent_attention import head_groups
from proa_engine.kernels.attention.paged_attention import AttentionPlan, plan_attention
from proa_engine.kernels.attention.store_kv import CacheRows, cache_rows
from proa_engine.kernels.launch import INTERPRETED
from proa_engine.kernels.sampling.decode_inputs import DecodeInputs
from proa_engine.kernels.states.state_rows import StatePlan, StateRows, plan_states
from proa_engine.layers.cache_layers import LayerCache
from proa_engine.layers.rotary import RotaryTable, Rotation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TableRows:
    """Where the batch's tokens are in the layers of one block table.

    A row of `block_table` is read up to ceil(seq_len / block_size) entries, from the first block that the layer's
    window can see; the others have no meaning.
    """

    block_table: torch.Tensor  # [R, max_blocks] int32
    slot_mapping: torch.Tensor  # [T] int64: block * block_size + offset of each token; -1: padding, written nowhere


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """The tokens of a step whose embeddings are given, such as those of images."""

    rows: torch.Tensor  # [N] int64: their rows among the step's tokens
    embeddings: torch.Tensor  # [N, width] in the model's type


@dataclass(frozen=True, slots=True)
class AudioRows:
    """The audio that each of a step's tokens reads by cross-attention."""

    block_table: torch.Tensor  # [T, max_blocks] int32, read up to the audio's length
    seq_lens: torch.Tensor  # [T] int32: tokens of the encoder's output
    query_start_loc: torch.Tensor  # [T + 1] int32: each token is a row of its own


@dataclass(frozen=True, slots=True)
class Taps:
    """The states that a step's layers leave for a drafter: those before the layers of these numbers, counted from 0;
    the number of layers stands for the state behind the last one."""

    layers: tuple[int, ...]
    states: torch.Tensor  # [T, len(layers) * hidden_size]: beside each other, in the order of `layers`

    def keep(self, number: int, state: torch.Tensor) -> None:
        """Copy the state [T, hidden_size] before layer `number`, one of `layers`."""
        size = state.shape[1]
        for place, layer in enumerate(self.layers):
            if layer == number:
                self.states[:, place * size : (place + 1) * size].copy_(state)


NO_TAPS = Taps((), torch.empty(0))


@dataclass(slots=True)
class CrossQueries:
    """The queries of the cross-attention heads that align a step's tokens with audio."""

    heads: Mapping[int, torch.Tensor]  # those of this rank, [heads] int64, by the layer's number
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # [T, heads, head_dim], by the layer's number
    _number: int = 0  # of the layer that keeps its queries next

    def keep(self, queries: torch.Tensor) -> None:
        """Take queries [T, heads, head_dim] of the next layer."""
        if self._number in self.heads:
            self.kept[self._number] = queries.index_select(1, self.heads[self._number])
        self._number += 1


class TokenType(IntEnum):
    FIRST = 0
    SECOND = 1  # in the second text of a pair
    UNATTENDED = 2  # in the first text; no token attends to it


@dataclass(slots=True)
class AttentionMetadata:
    """A batch of R requests with T tokens in all, decodes first. Tensors lie on the model's device.

    A request's tokens are its last ones: those that end at seq_len. Where decodes have more than one token, some may
    lie before the request's beginning or have slot -1: these are padding. The features of a step set the fields behind
    `decode_width` before its layers run; layers only read.
    """

    query_start_loc: torch.Tensor  # [R + 1] int32: request r's tokens are query_start_loc[r] … query_start_loc[r + 1]
    seq_lens: torch.Tensor  # [R] int32: tokens in the KV cache once this step has written its own
    tables: tuple[TableRows, ...]  # by `LayerCache.table`
    num_decodes: int  # leading requests with `decode_width` tokens each
    decode_width: int = 1  # more if drafts are verified; then the batch has decodes only
    states: StateRows | None = None  # set if the model has recurrent layers
    token_types: torch.Tensor | None = None  # [T] int64, see `TokenType`, for encoders; None: all 0
    media: EmbeddedRows | None = None  # what encoders made of the tokens that stand for images and audios
    prompt_embeds: EmbeddedRows | None = None  # of tokens whose embeddings came with the request
    audio: AudioRows | None = None  # set if the model has cross-attention
    cross_queries: CrossQueries | None = None  # set if tokens of the step are aligned with audio
    # [T] int32, for models whose image tokens attend to all of their image: the position behind each token's image,
    # else behind the token itself. None: the step has no image.
    ends: torch.Tensor | None = None
    taps: Taps = NO_TAPS


def decode_metadata(inputs: DecodeInputs, width: int = 1) -> AttentionMetadata:
    """The batch of decodes of `width` tokens each with these inputs."""
    num_rows, device = inputs.seq_lens.shape[0], inputs.seq_lens.device
    return AttentionMetadata(
        query_start_loc=torch.arange(0, (num_rows + 1) * width, width, dtype=torch.int32, device=device),
        seq_lens=inputs.seq_lens,
        tables=table_rows(inputs.block_tables, inputs.slot_mappings),
        num_decodes=num_rows,
        decode_width=width,
    )


def table_rows(block_tables: torch.Tensor, slot_mappings: torch.Tensor) -> tuple[TableRows, ...]:
    """The tables of block_tables [tables, R, max_blocks] int32 and slot_mappings [tables, T] int64."""
    return tuple(map(TableRows, block_tables.unbind(), slot_mappings.unbind()))


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What a step has for attention layers that are alike in their cache's layout, their rotation and their window."""

    table: TableRows
    rotation: Rotation
    plan: AttentionPlan
    rows: CacheRows | None  # as from `AttentionStep.cache_rows`
    ends: torch.Tensor | None  # as `AttentionMetadata.ends`


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What attention layers of one step share. Its methods compute at the first layer that needs the result."""

    metadata: AttentionMetadata
    positions: torch.Tensor  # [T] int64
    batch_invariant: bool
    _made: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return what `make` returned at the first call with this key in the step."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def inputs(
        self, cache: LayerCache, rotary: RotaryTable, window: int | None, *, causal: bool, within_images: bool
    ) -> AttentionInputs:
        """`within_images`: tokens of images attend as `AttentionMetadata.ends` says."""
        return self.once(
            ("inputs", cache.layout, rotary, window, causal, within_images),
            lambda: AttentionInputs(
                self.metadata.tables[cache.table],
                self.rotation(rotary),
                self.plan(cache, window, causal=causal, within_images=within_images),
                self.cache_rows(cache),
                self.metadata.ends if within_images else None,
            ),
        )

    def rotation(self, table: RotaryTable) -> Rotation:
        return self.once(("rotation", table), lambda: table(self.positions))

    def plan(
        self, cache: LayerCache, window: int | None, *, causal: bool = True, within_images: bool = True
    ) -> AttentionPlan:
        """The plan of layers with this block table, window and layout of the cache. The flags are those of `inputs`.

        On a GPU a plan depends on the number of KV heads only, so tables and layouts share it.
        """
        return self._plan(cache, cache.tensors[0].shape, window, causal=causal, within_images=within_images)

    def latent_plan(self, cache: LayerCache, num_heads: int) -> AttentionPlan:
        """The plan of latent layers with this block table, whose rank has `num_heads` heads."""
        num_blocks, block_size, row_size = cache.tensors[0].shape
        groups = 1 if self.positions.is_cpu else head_groups(num_heads)
        return self._plan(cache, torch.Size((num_blocks, groups, block_size, row_size)), None)

    def latent_part_plan(self, seq_lens: torch.Tensor, num_heads: int) -> DecodePlan | None:
        """The plan of latent layers whose rank holds `seq_lens` [R] int32 tokens of the requests; None on a CPU."""
        if seq_lens.is_cpu and not INTERPRETED:
            return None
        metadata = self.metadata
        groups = head_groups(num_heads)
        return plan_decodes(seq_lens, metadata.num_decodes, groups, None, metadata.decode_width)

    def _plan(
        self,
        cache: LayerCache,
        cache_shape: torch.Size,
        window: int | None,
        *,
        causal: bool = True,
        within_images: bool = True,
    ) -> AttentionPlan:
        metadata, table = self.metadata, self.metadata.tables[cache.table]
        return self.once(
            ("plan", window, causal, within_images, cache.layout if self.positions.is_cpu else cache_shape[1]),
            lambda: plan_attention(
                metadata.query_start_loc,
                metadata.seq_lens,
                table.block_table,
                metadata.num_decodes,
                cache_shape,
                window,
                decode_width=metadata.decode_width,
                batch_invariant=self.batch_invariant,
                slot_mapping=table.slot_mapping,
                block_stride=cache.tensors[0].stride(0),
                ends=metadata.ends if within_images else None,
                causal=causal,
            ),
        )

    def audio_plan(self, rows: AudioRows, cache: LayerCache) -> AttentionPlan:
        """The plan of cross-attention layers with this layout of the cache."""
        return self.once(
            ("audio plan", cache.layout),
            lambda: plan_attention(
                rows.query_start_loc,
                rows.seq_lens,
                rows.block_table,
                rows.seq_lens.shape[0],
                cache.tensors[0].shape,
                None,
                batch_invariant=self.batch_invariant,
                block_stride=cache.tensors[0].stride(0),
            ),
        )

    def cache_rows(self, cache: LayerCache) -> CacheRows | None:
        """Where layers with this block table and layout of the cache write; None on a GPU, which needs only slots."""
        keys = cache.tensors[0]
        if not keys.is_cpu:
            return None
        slots = self.metadata.tables[cache.table].slot_mapping
        return self.once(("cache rows", cache.layout), lambda: cache_rows(slots, keys.shape, keys.stride(0)))

    def state_plan(self, num_inputs: int) -> StatePlan | None:
        """Where recurrent layers read and write states, as `plan_states`; None on a GPU, which needs only
        `AttentionMetadata.states`."""
        states = self.metadata.states
        assert states is not None
        if not states.read.is_cpu:
            return None
        return self.once(("states", num_inputs), lambda: plan_states(self.metadata.query_start_loc, states, num_inputs))
