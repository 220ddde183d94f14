"""Prompt embeddings: the rows of a step whose embeddings came with the request, in the place of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proa.contract import EmbeddingType, PromptEmbeds
from proa_engine.core.types import NewRequestData
from proa_engine.layers.attention_metadata import EmbeddedRows
from proa_engine.step.columns import Columns, ForwardInputs, Rows
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray, Packer

NO_TOKEN = -1  # in the token table; penalties skip it

_DTYPES = {
    EmbeddingType.FLOAT32: torch.float32,
    EmbeddingType.FLOAT16: torch.float16,
    EmbeddingType.BFLOAT16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Embeddings of neighbouring tokens, on the host in the type in which they came."""

    offset: int  # tokens of the request before the first
    values: Tensor  # [tokens, hidden_size]

    @property
    def end(self) -> int:
        return self.offset + len(self.values)


@dataclass(frozen=True, slots=True)
class PromptEmbedsInputs:
    """The embedded tokens of a step."""

    rows: int  # staged index: [N], their rows among the step's tokens
    parts: Sequence[Tensor]  # these N tokens' embeddings, in order, on the host
    dtype: torch.dtype  # the model's

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        rows = arrays[self.rows]
        forward.inputs.index_fill_(0, rows, 0)  # any token that can be looked up
        forward.metadata.prompt_embeds = EmbeddedRows(rows, self._on(rows.device))

    def _on(self, device: torch.device) -> Tensor:
        """Copy the embeddings to the device, [N, hidden_size], without waiting: pinned memory is not reused before it
        is copied."""
        shape = sum(map(len, self.parts)), self.parts[0].shape[1]
        joined = torch.empty(shape, dtype=self.dtype, pin_memory=device.type == "cuda")
        start = 0
        for part in self.parts:
            joined[start : start + len(part)] = part
            start += len(part)
        return joined.to(device, non_blocking=True)


class PromptEmbedsColumns(Columns):
    """The prompt embeddings of the slots whose requests have some. Only the first pipeline stage has these columns."""

    def __init__(self, tables: SlotTables, hidden_size: int, dtype: torch.dtype) -> None:
        """`dtype` is the type of the model's activations."""
        self._tables = tables
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._pieces: dict[int, list[_Piece]] = {}  # by slot, by ascending offset
        self._ends = np.zeros(tables.num_slots, np.int64)  # tokens up to the last embedding

    @property
    def is_used(self) -> bool:
        return bool(self._pieces)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        self._ends[slot] = 0
        if not request.prompt_embeds:
            return
        pieces = self._pieces[slot] = [self._piece(embeds) for embeds in request.prompt_embeds]
        self._ends[slot] = pieces[-1].end
        for piece in pieces:
            first = slot * self._tables.token_width + piece.offset
            edits.write_slice(self._tables.flat_token_ids, first, [NO_TOKEN] * len(piece.values))

    def remove(self, slot: int) -> None:
        self._pieces.pop(slot, None)

    def graph_shape(self, rows: Rows, shape: GraphShape) -> GraphShape | None:
        """Return None if a row may compute an embedded token."""
        return shape if (rows.starts >= self._ends[rows.slots]).all() else None

    def lay_out(self, rows: Rows, packer: Packer) -> PromptEmbedsInputs | None:
        parts: list[Tensor] = []
        token_rows: list[IntArray] = []
        for row in np.flatnonzero(rows.starts < self._ends[rows.slots]).tolist():
            start, end = int(rows.starts[row]), int(rows.ends[row])
            shift = int(rows.query_start_loc[row]) - start
            for piece in self._pieces[int(rows.slots[row])]:
                first, behind = max(piece.offset, start), min(piece.end, end)
                if first < behind:
                    parts.append(piece.values[first - piece.offset : behind - piece.offset])
                    token_rows.append(np.arange(first + shift, behind + shift))
        return PromptEmbedsInputs(packer.add(np.concatenate(token_rows)), parts, self._dtype) if parts else None

    def _piece(self, embeds: PromptEmbeds) -> _Piece:
        values = torch.empty(embeds.num_tokens, self._hidden_size, dtype=_DTYPES[embeds.type])
        values.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(embeds.values, np.uint8)
        return _Piece(embeds.offset, values)
