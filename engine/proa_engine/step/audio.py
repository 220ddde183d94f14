"""Audio that all tokens of a request read by cross-attention: its encoding, which blocks a token reads, and how much it
reads of each token of the audio."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proa.contract import PoolingTask
from proa.contract.audio import SAMPLE_BYTES
from proa_engine.core.types import CrossInput, NewRequestData, PooledRows
from proa_engine.layers.attention_metadata import AudioRows, CrossQueries
from proa_engine.layers.cache_layers import LayerCache
from proa_engine.layers.cross_attention import alignment
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.audio_config import AudioConfig
from proa_engine.models.base import CrossReader
from proa_engine.step.columns import Columns, Computed, ForwardInputs, Rows, StepLayout, StepOutputs, StepPart
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.media import encoding_rank, to_device
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import Packer


class AudioWriter:
    """Encodes audios and writes what cross-attention layers keep of them to their blocks.

    All ranks have the encoder's weights. They encode the audios of a step in turns and broadcast the results, and each
    writes the keys and values of its own heads.
    """

    def __init__(
        self,
        model: CrossReader,
        config: AudioConfig,
        caches: Sequence[LayerCache],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext,
    ) -> None:
        """`caches`: those of the model, a list that is emptied when they are freed. `dtype` is the type of the model's
        activations."""
        self._model = model
        self._config = config
        self._caches = caches
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._parallel = parallel

    def write(self, inputs: Sequence[CrossInput]) -> None:
        parallel = self._parallel
        ranks = [encoding_rank(index, parallel.world_size) for index in range(len(inputs))]
        own = {
            index: self._model.audio_encoder(self._samples(inputs[index])).contiguous()
            for index, rank in enumerate(ranks)
            if rank == parallel.rank
        }
        for index, (each, rank) in enumerate(zip(inputs, ranks, strict=True)):
            encoded = own[index] if rank == parallel.rank else self._empty(each)
            encoded, slots = parallel.broadcast(encoded, source=rank), self._slots(each)
            for layer, cache in self._model.cross_layers(self._caches):
                layer.write(encoded, cache, slots)

    def _empty(self, audio: CrossInput) -> Tensor:
        shape = audio.num_tokens, self._config.embedding_width
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _samples(self, audio: CrossInput) -> Tensor:
        return to_device(audio.samples, (len(audio.samples) // SAMPLE_BYTES,), torch.float32, self._device)

    def _slots(self, audio: CrossInput) -> Tensor:
        """The slots of the audio's tokens, [num_tokens] int64."""
        first = np.array(audio.block_ids)[:, None] * self._block_size
        slots = (first + np.arange(self._block_size)).reshape(-1)[: audio.num_tokens]
        return torch.from_numpy(slots).to(self._device)


@dataclass(frozen=True, slots=True)
class AudioTables:
    """The blocks of each slot's audio, on the device: [slots, columns] int32, and the length of each, [slots] int32.

    A slot that was never used has a length of 1: graphs pad with slot 0, and attention to nothing has no result.
    """

    blocks: Tensor
    lengths: Tensor

    def rows(self, slots: Tensor) -> AudioRows:
        """`slots` [T] int64, of each token of a step."""
        starts = torch.arange(slots.shape[0] + 1, dtype=torch.int32, device=slots.device)
        return AudioRows(self.blocks.index_select(0, slots), self.lengths.index_select(0, slots), starts)


@dataclass(frozen=True, slots=True)
class AudioInputs:
    """The audios that a step's tokens read."""

    tables: AudioTables
    slots: int  # staged index: [T]

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        forward.metadata.audio = self.tables.rows(arrays[self.slots])


@dataclass(frozen=True, slots=True)
class AudioPart(StepPart):
    """The encoder's work before a step's forward pass."""

    is_large = True

    writer: AudioWriter
    inputs: list[CrossInput]

    def before_forward(self, arrays: list[Tensor]) -> None:
        self.writer.write(self.inputs)


class AudioColumns(Columns):
    """The audio of each slot's request."""

    def __init__(self, tables: SlotTables, writer: AudioWriter, max_tokens: int) -> None:
        """`max_tokens`: of the longest audio."""
        columns = -(-max_tokens // tables.block_size)
        self._writer = writer
        self.tables = AudioTables(
            torch.zeros(tables.num_slots, columns, dtype=torch.int32, device=tables.device),
            torch.ones(tables.num_slots, dtype=torch.int32, device=tables.device),
        )

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        blocks = self.tables.blocks
        padding = [0] * (blocks.shape[1] - len(request.audio.block_ids))
        edits.write(blocks, [slot], [*request.audio.block_ids, *padding])
        edits.write(self.tables.lengths, [slot], [request.audio.num_tokens])

    def lay_out(self, rows: Rows, packer: Packer) -> AudioInputs:
        return AudioInputs(self.tables, packer.add(np.repeat(rows.slots, rows.counts)))

    def fill_decodes(self, forward: ForwardInputs, columns: Tensor, shape: GraphShape) -> None:
        forward.metadata.audio = self.tables.rows(columns[0].repeat_interleave(shape.width))

    def lay_out_part(self, step: StepLayout, packer: Packer) -> AudioPart | None:
        """Return the encoder's work; None if there is none."""
        return AudioPart(self._writer, step.plan.cross_inputs) if step.plan.cross_inputs else None


@dataclass(frozen=True, slots=True)
class AlignedRow:
    """A row of a step whose request is aligned. Its tokens are `first` up to `end` of the step's."""

    request_id: str
    slot: int
    first: int
    end: int
    is_first: bool  # it computes the prompt's first token
    is_last: bool  # it computes the prompt's last token
    num_computed: int  # tokens of the prompt up to its end
    audio_tokens: int
    num_kept: int  # leading values of each token


@dataclass(frozen=True, slots=True)
class AlignmentPart(StepPart):
    """What a step aligns."""

    columns: "AlignmentColumns"
    rows: list[AlignedRow]

    def after_sample(self, arrays: Sequence[Tensor], computed: Computed, token_ids: Tensor | None) -> list[Tensor]:
        """Return the values of each prompt that is complete, [tokens, num_kept] float32."""
        assert isinstance(computed.forward, ForwardInputs), "these rows have no graph"
        queries = computed.forward.metadata.cross_queries
        assert queries
        return self.columns.align(self.rows, queries.kept)

    def add_results(self, results: list[Tensor], outputs: StepOutputs) -> None:
        complete = [row for row in self.rows if row.is_last]
        for row, values in zip(complete, results, strict=True):
            data = values.numpy().astype("<f4", copy=False).tobytes()
            outputs.others[row.request_id].pooled = PooledRows(0, len(values), data)


@dataclass(frozen=True, slots=True)
class AlignmentInputs:
    """A `TokenInputs` that keeps the queries of these heads."""

    heads: Mapping[int, Tensor]

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        forward.metadata.cross_queries = CrossQueries(self.heads)


class AlignmentColumns(Columns):
    """The requests that are aligned by slot, and the queries that earlier chunks of their prompts computed."""

    def __init__(
        self,
        tables: SlotTables,
        audio: AudioTables,
        model: CrossReader,
        caches: Sequence[LayerCache],
        heads: Sequence[tuple[int, int]],
        parallel: ParallelContext,
    ) -> None:
        """`caches`: as `AudioWriter`. `heads`: the numbers of layers and heads, of all ranks."""
        self._tables = tables
        self._audio = audio
        self._model = model
        self._caches = caches
        self._num_heads = len(heads)
        self._parallel = parallel
        own: dict[int, list[int]] = {}
        layers = model.cross_layers(caches)
        for number, head in heads:
            share = layers[number][0].heads
            if share.start <= head < share.start + share.length:
                own.setdefault(number, []).append(head - share.start)
        self._heads = {number: torch.tensor(each, device=tables.device) for number, each in own.items()}
        self._requests: dict[int, tuple[int, int]] = {}  # tokens of the audio, and how many of the values are kept
        self._queries: dict[int, list[Mapping[int, Tensor]]] = {}  # by slot, until the next request's first chunk

    @property
    def is_used(self) -> bool:
        return bool(self._requests)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        params = request.pooling_params
        if params and params.task is PoolingTask.ALIGN:
            num_tokens = request.audio.num_tokens
            self._requests[slot] = num_tokens, params.dimensions or num_tokens
            self._tables.num_tokens[slot] += 1  # as of all pooled requests, so that none samples

    def remove(self, slot: int) -> None:
        self._requests.pop(slot, None)

    def graph_shape(self, rows: Rows, shape: GraphShape) -> GraphShape | None:
        """Return None if a row is aligned."""
        return None if any(slot in self._requests for slot in rows.slots.tolist()) else shape

    def lay_out(self, rows: Rows, packer: Packer) -> AlignmentInputs | None:
        return AlignmentInputs(self._heads) if any(slot in self._requests for slot in rows.slots.tolist()) else None

    def lay_out_part(self, step: StepLayout, packer: Packer) -> AlignmentPart | None:
        rows = step.rows
        found = [
            AlignedRow(
                request_id=rows.request_ids[row],
                slot=slot,
                first=int(rows.query_start_loc[row]),
                end=int(rows.query_start_loc[row + 1]),
                is_first=bool(rows.starts[row] == 0),
                is_last=bool(rows.ends[row] == self._tables.num_prompt_tokens[slot]),
                num_computed=int(rows.ends[row]),
                audio_tokens=self._requests[slot][0],
                num_kept=self._requests[slot][1],
            )
            for row, slot in enumerate(rows.slots.tolist())
            if slot in self._requests
        ]
        return AlignmentPart(self, found) if found else None

    def align(self, rows: Sequence[AlignedRow], kept: Mapping[int, Tensor]) -> list[Tensor]:
        """See `AlignmentPart.after_sample`. `kept`: the queries of the step's tokens."""
        results = []
        for row in rows:
            if row.is_first:
                self._queries[row.slot] = []
            self._queries[row.slot].append({number: each[row.first : row.end] for number, each in kept.items()})
            if row.is_last:
                results.append(self._aligned(row, self._queries.pop(row.slot)))
        return results

    def _aligned(self, row: AlignedRow, chunks: Sequence[Mapping[int, Tensor]]) -> Tensor:
        """The mean over all heads, [tokens, num_kept]."""
        blocks = self._audio.blocks[row.slot].long()
        layers = self._model.cross_layers(self._caches)
        total = torch.zeros(row.num_computed, row.num_kept, device=self._tables.device)
        for number, heads in self._heads.items():
            queries = torch.cat([chunk[number] for chunk in chunks])
            keys = layers[number][1].tensors[0]  # [num_blocks, heads, block_size, D]
            keys = keys.index_select(0, blocks).index_select(1, heads)
            keys = keys.transpose(0, 1).flatten(1, 2)[:, : row.audio_tokens]
            for head in range(len(heads)):
                total += alignment(queries[:, head], keys[head], row.num_kept)
        return self._parallel.all_reduce(total) / self._num_heads
