"""Run a model as a worker does, over a paged KV cache with randomly ordered blocks that are filled with NaN, and slots
of states, each written once."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from proa_engine.core.types import NO_STATE, MediaSpan
from proa_engine.kernels.states.state_rows import StateRows
from proa_engine.layers.attention_metadata import AttentionMetadata, EmbeddedRows, TableRows
from proa_engine.layers.cache_layers import LayerCache, SharedLayer, StateLayer
from proa_engine.memory.cache_plan import allocate_caches, plan_caches
from proa_engine.models.base import CausalLM
from proa_engine.models.image_config import ImageConfig
from proa_engine.step.image_attention import ImagePositions, three_positions

NUM_STATE_SLOTS = 200


def attention_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> AttentionMetadata:
    """Of requests whose last `query_lens[i]` of `seq_lens[i]` tokens are computed now; decodes must come first."""
    starts = [0]
    slots: list[int] = []
    for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
        starts.append(starts[-1] + query_len)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(seq_len - query_len, seq_len)]
    width = max(map(len, block_tables)) + 2  # a worker's table is wider than any request
    table = [[*blocks, *[0] * (width - len(blocks))] for blocks in block_tables]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        tables=(
            TableRows(
                block_table=torch.tensor(table, dtype=torch.int32, device=device),
                slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            ),
        ),
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
    )


def nan_caches(
    model: CausalLM,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    num_state_slots: int = 0,
) -> list[LayerCache]:
    """The caches of a model's layers, each in its own memory, filled with NaN, so that reads before writes show."""
    caches: list[LayerCache] = []
    for layer in model.cache_layers():
        if isinstance(layer, SharedLayer):
            caches.append(caches[layer.layer])
            continue
        plan = plan_caches([layer], block_size, dtype, max_model_len=1)  # one table: no window is shorter
        caches += allocate_caches([layer], plan, num_blocks, dtype, torch.device(device), num_state_slots).layers
    for cache in caches:
        for tensor in cache.tensors:
            tensor.fill_(torch.nan)
    return caches


@dataclass(frozen=True)
class EncodedImage:
    """An image among a sequence's tokens."""

    span: MediaSpan
    embeddings: torch.Tensor  # [tokens, width]


@dataclass
class CachedSequence:
    """One request: its tokens, how many of them are in the cache, and where."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    state: int = NO_STATE  # slot of the recurrent layers' states after `num_computed` tokens
    cuts: tuple[int, ...] = ()  # positions at which states are kept
    kept: dict[int, int] = field(default_factory=dict)  # position -> slot
    images: Sequence[EncodedImage] = ()

    def restart(self, position: int) -> "CachedSequence":
        """The same request with only its first `position` tokens, of `cuts`, in the cache."""
        return CachedSequence(self.token_ids, position, self.blocks[:], self.kept[position], images=self.images)

    def three_positions(self, unit: int) -> torch.Tensor:
        """Of all tokens, [3, tokens]."""
        places = np.tile(np.arange(len(self.token_ids)), (3, 1))
        if self.images:
            spans = [image.span for image in self.images]
            images = ImagePositions(spans, three_positions(spans, unit))
            places = np.concatenate((images.positions, places[:, images.end :] + images.delta), axis=1)
        return torch.from_numpy(places)


class PagedModel:
    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        image_config: ImageConfig | None = None,
    ) -> None:
        self.model = model
        self.image_config = image_config
        self.block_size = block_size
        self.device = device
        self.has_states = any(isinstance(layer, StateLayer) for layer in model.cache_layers())
        num_slots = NUM_STATE_SLOTS if self.has_states else 0
        self.caches = nan_caches(model, num_blocks, block_size, dtype, device, num_slots)
        self.free_slots = list(range(num_slots))
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)

    def step(self, plan: Sequence[tuple[CachedSequence, int]]) -> list[torch.Tensor]:
        """Compute the next n tokens of each sequence in one batch; returns hidden states [n, H], in plan order."""
        order = sorted(range(len(plan)), key=lambda i: plan[i][1] != 1)
        query_lens: list[int] = []
        seq_lens: list[int] = []
        ids: list[int] = []
        positions: list[int] = []
        for sequence, n in (plan[i] for i in order):
            end = sequence.num_computed + n
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free_blocks.pop())
            ids += sequence.token_ids[sequence.num_computed : end]
            positions += range(sequence.num_computed, end)
            query_lens.append(n)
            seq_lens.append(end)
            sequence.num_computed = end
        sequences = [plan[i][0] for i in order]
        metadata = attention_metadata(
            query_lens, seq_lens, [sequence.blocks for sequence in sequences], self.block_size, self.device
        )
        if self.has_states:
            metadata = replace(metadata, states=self._states(sequences, query_lens))
        inputs = torch.tensor(positions, device=self.device)
        if self.image_config is not None and any(sequence.images for sequence in sequences):
            metadata = replace(metadata, media=_image_rows(sequences, query_lens))
            if self.image_config.attends_within:
                metadata = replace(metadata, ends=_ends(sequences, query_lens).to(self.device))
            if self.image_config.has_three_positions:
                unit = self.image_config.input.unit
                inputs = _of_step([each.three_positions(unit) for each in sequences], sequences, query_lens)
                inputs = inputs.to(self.device)
        hidden = self.model(torch.tensor(ids, device=self.device), inputs, self.caches, metadata)
        results = [hidden[:0]] * len(plan)
        for i, rows in zip(order, hidden.split(query_lens), strict=True):
            results[i] = rows
        return results

    def _states(self, sequences: Sequence[CachedSequence], query_lens: Sequence[int]) -> StateRows:
        """Every state is written to a slot of its own. Sequences are those after the step."""
        read, write, first_segments, segment_starts = [], [], [0], [0]
        for sequence, query_len in zip(sequences, query_lens, strict=True):
            read.append(sequence.state)
            end = sequence.num_computed
            start = end - query_len
            for position in (*(cut for cut in sequence.cuts if start < cut < end), end):
                sequence.state = self.free_slots.pop()
                sequence.kept[position] = sequence.state
                write.append(sequence.state)
                segment_starts.append(segment_starts[first_segments[-1]] + position - start)
            first_segments.append(len(write))

        def on_device(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        return StateRows(on_device(read), on_device(write), on_device(first_segments), on_device(segment_starts))

    def prefill(self, token_ids: list[int], chunk: int | None = None) -> torch.Tensor:
        """Hidden states [T, H] of one sequence alone, `chunk` tokens a step (default: all at once)."""
        sequence = CachedSequence(token_ids)
        chunk = chunk or len(token_ids)
        parts = []
        while sequence.num_computed < len(token_ids):
            parts += self.step([(sequence, min(chunk, len(token_ids) - sequence.num_computed))])
        return torch.cat(parts)


def _of_step(
    parts: Sequence[torch.Tensor], sequences: Sequence[CachedSequence], query_lens: Sequence[int]
) -> torch.Tensor:
    """The columns of the step's tokens, of one tensor [n, tokens] for each sequence."""
    rows = zip(parts, sequences, query_lens, strict=True)
    return torch.cat([part[:, each.num_computed - n : each.num_computed] for part, each, n in rows], dim=1)


def _ends(sequences: Sequence[CachedSequence], query_lens: Sequence[int]) -> torch.Tensor:
    """As `AttentionMetadata.ends`."""
    parts = []
    for sequence in sequences:
        ends = torch.arange(len(sequence.token_ids), dtype=torch.int32)[None] + 1
        for image in sequence.images:
            end = image.span.offset + image.span.num_tokens
            ends[:, image.span.offset : end] = end
        parts.append(ends)
    return _of_step(parts, sequences, query_lens)[0]


def _image_rows(sequences: Sequence[CachedSequence], query_lens: Sequence[int]) -> EmbeddedRows | None:
    """As `AttentionMetadata.media`."""
    rows: list[int] = []
    embeddings: list[torch.Tensor] = []
    first_row = 0
    for sequence, num_tokens in zip(sequences, query_lens, strict=True):
        start, end = sequence.num_computed - num_tokens, sequence.num_computed
        for image in sequence.images:
            first, behind = max(start, image.span.offset), min(end, image.span.offset + image.span.num_tokens)
            if first < behind:
                rows += range(first_row + first - start, first_row + behind - start)
                embeddings.append(image.embeddings[first - image.span.offset : behind - image.span.offset])
        first_row += num_tokens
    return EmbeddedRows(torch.tensor(rows, device=embeddings[0].device), torch.cat(embeddings)) if rows else None
