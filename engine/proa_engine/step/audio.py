"""Audio that all tokens of a request read by cross-attention: its encoding, and which blocks a token reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proa.contract.audio import SAMPLE_BYTES
from proa_engine.core.types import CrossInput, NewRequestData
from proa_engine.layers.attention_metadata import AudioRows
from proa_engine.layers.cache_layers import LayerCache
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.audio_config import AudioConfig
from proa_engine.models.base import CrossReader
from proa_engine.step.columns import Columns, ForwardInputs, Rows, StepLayout, StepPart
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
        """`dtype` is the type of the model's activations."""
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
            self._model.write_audio(parallel.broadcast(encoded, source=rank), self._caches, self._slots(each))

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
        self._tables = AudioTables(
            torch.zeros(tables.num_slots, columns, dtype=torch.int32, device=tables.device),
            torch.ones(tables.num_slots, dtype=torch.int32, device=tables.device),
        )

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        blocks = self._tables.blocks
        padding = [0] * (blocks.shape[1] - len(request.audio.block_ids))
        edits.write(blocks, [slot], [*request.audio.block_ids, *padding])
        edits.write(self._tables.lengths, [slot], [request.audio.num_tokens])

    def lay_out(self, rows: Rows, packer: Packer) -> AudioInputs:
        return AudioInputs(self._tables, packer.add(np.repeat(rows.slots, rows.counts)))

    def fill_decodes(self, forward: ForwardInputs, columns: Tensor, shape: GraphShape) -> None:
        forward.metadata.audio = self._tables.rows(columns[0].repeat_interleave(shape.width))

    def lay_out_part(self, step: StepLayout, packer: Packer) -> AudioPart | None:
        """Return the encoder's work; None if there is none."""
        return AudioPart(self._writer, step.plan.cross_inputs) if step.plan.cross_inputs else None
