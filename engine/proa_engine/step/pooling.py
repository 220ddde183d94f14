"""PoolingColumns: pooled requests by slot, which hidden states a step pools for them, and the results on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from proa.contract import PoolingParams, PoolingTask
from proa_engine.core.types import NewRequestData, PooledRows
from proa_engine.layers.attention_metadata import TokenType
from proa_engine.models.base import CausalLM
from proa_engine.models.pooling_config import PoolingConfig, PoolingKind
from proa_engine.models.pooling_heads import PoolingHeads
from proa_engine.step.columns import Columns, Computed, ForwardInputs, Rows, StepLayout, StepOutputs, StepPart
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class Sums:
    """Staged indices of hidden states that are added to their requests' sums, [tokens], grouped by request."""

    hidden_rows: int  # [tokens]
    lengths: int  # [requests]: number of tokens of each
    slots: int  # [requests]
    is_first: int  # [requests]: 1 where the sum begins


@dataclass(frozen=True, slots=True)
class PooledGroup:
    """Rows of results with equal parameters, in order. Staged indices have one entry for each row."""

    task: PoolingTask
    dimensions: int | None
    use_activation: bool | None
    requests: list[tuple[str, int, int, int]]  # request id, its rows before, its rows here, values of a row; 0: all
    rows: int  # staged index: rows of the hidden states, or slots if they are summed
    counts: int | None  # staged index: number of tokens in each sum; None: they are not summed
    token_ids: int | None  # staged index: [rows, most token ids], for TOKEN_LOGPROBS


@dataclass(frozen=True, slots=True)
class PoolingPart(StepPart):
    """What a step pools."""

    reads_hidden = True

    columns: "PoolingColumns"
    sums: Sums | None
    groups: list[PooledGroup]

    def after_sample(self, arrays: Sequence[Tensor], computed: Computed, token_ids: Tensor | None) -> list[Tensor]:
        """Return the rows of each group, [rows, values] float32."""
        return self.columns.pool(self, arrays, computed.hidden)

    def add_results(self, results: list[Tensor], outputs: StepOutputs) -> None:
        for values, group in zip(results, self.groups, strict=True):
            rows, end = values.numpy().astype("<f4", copy=False), 0
            for request_id, num_before, num_rows, num_values in group.requests:
                start, end = end, end + num_rows
                pooled = PooledRows(num_before, num_rows, rows[start:end, : num_values or None].tobytes())
                outputs.others[request_id].pooled = pooled


@dataclass(frozen=True, slots=True)
class TokenTypes:
    """The `TokenType` of each token of a step, [tokens]. A staged index."""

    index: int

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        forward.metadata.token_types = arrays[self.index]


@dataclass(slots=True)
class _Group:
    """A `PooledGroup` on the host, while the step is laid out."""

    params: PoolingParams
    requests: list[tuple[str, int, int, int]] = field(default_factory=list)
    rows: list[IntArray] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[tuple[int, ...]] = field(default_factory=list)

    def pack(self, packer: Packer) -> PooledGroup:
        params, width = self.params, max(map(len, self.token_ids), default=0)
        token_ids = np.array([[*ids, *[0] * (width - len(ids))] for ids in self.token_ids], np.int64)
        return PooledGroup(
            task=params.task,
            dimensions=params.dimensions,
            use_activation=params.use_activation,
            requests=self.requests,
            rows=packer.add(np.concatenate(self.rows)),
            counts=packer.add(np.array(self.counts, np.int64)) if self.counts else None,
            token_ids=packer.add(token_ids.reshape(-1)) if width else None,
        )


class PoolingColumns(Columns):
    """The pooled requests by slot, and the sums of the hidden states that earlier chunks of their prompts computed."""

    def __init__(
        self, tables: SlotTables, config: PoolingConfig, model: CausalLM, heads: PoolingHeads, hidden_size: int
    ) -> None:
        self._tables = tables
        self._kinds = config.kinds
        self._model = model
        self._heads = heads
        self._params: dict[int, PoolingParams] = {}
        self._sums: Tensor | None = None  # [slots, hidden_size] float32; None: no task of the model needs them
        if config.needs_sums:
            self._sums = torch.zeros(tables.num_slots, hidden_size, device=tables.device)

    @property
    def is_used(self) -> bool:
        return bool(self._params)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        params = request.pooling_params
        if params and params.task is not PoolingTask.ALIGN:  # which reads no hidden states
            self._params[slot] = params
            self._tables.num_tokens[slot] += 1  # one more than the steps compute, so that none samples

    def remove(self, slot: int) -> None:
        self._params.pop(slot, None)

    def graph_shape(self, rows: Rows, shape: GraphShape) -> GraphShape | None:
        """Return None if a row's hidden states are pooled."""
        return None if any(slot in self._params for slot in rows.slots.tolist()) else shape

    def lay_out(self, rows: Rows, packer: Packer) -> TokenTypes | None:
        """Return the types of the step's tokens; None if they are all `FIRST`."""
        types = np.zeros(int(rows.counts.sum()), np.int64)
        for row, slot in enumerate(rows.slots.tolist()):
            if (params := self._params.get(slot)) is None:
                continue
            starts = {TokenType.SECOND: params.second_segment_start, TokenType.UNATTENDED: params.expansion_start}
            for kind, start in starts.items():
                if start is not None:
                    row_types = types[rows.query_start_loc[row] : rows.query_start_loc[row + 1]]
                    row_types[max(0, start - int(rows.starts[row])) :] = kind
        return TokenTypes(packer.add(types)) if types.any() else None

    def lay_out_part(self, step: StepLayout, packer: Packer) -> PoolingPart | None:
        """Return what the step pools; None if it neither returns nor sums hidden states of a pooled request."""
        rows = step.rows
        groups: dict[tuple[object, ...], _Group] = {}
        parts: list[IntArray] = []  # of the sums
        slots: list[int] = []
        is_first: list[int] = []
        for row, slot in enumerate(rows.slots.tolist()):
            params = self._params.get(slot)
            if params is None:
                continue
            kind = self._kinds[params.task]
            start, num_prompt_tokens = int(rows.starts[row]), int(self._tables.num_prompt_tokens[slot])
            hidden_rows = np.arange(rows.query_start_loc[row], rows.query_start_loc[row + 1])
            if kind is PoolingKind.MEAN or (kind is PoolingKind.FIRST and start == 0):
                parts.append(hidden_rows[:1] if kind is PoolingKind.FIRST else hidden_rows)
                slots.append(slot)
                is_first.append(int(start == 0))
            if kind is not PoolingKind.ALL and rows.ends[row] < num_prompt_tokens:
                continue
            key = (params.task, params.dimensions, params.use_activation)
            group = groups.setdefault(key, _Group(params))
            name, num_values = rows.request_ids[row], len(params.score_token_ids)
            if kind is PoolingKind.ALL:
                group.requests.append((name, start, hidden_rows.size, num_values))
                group.rows.append(hidden_rows)
                continue
            group.requests.append((name, 0, 1, num_values))
            if kind is PoolingKind.LAST:
                group.rows.append(hidden_rows[-1:])
            else:
                group.rows.append(np.array([slot]))
                group.counts.append(num_prompt_tokens if kind is PoolingKind.MEAN else 1)
            if num_values:
                group.token_ids.append(params.score_token_ids)
        if not (groups or parts):
            return None
        sums = _pack_sums(parts, slots, is_first, packer)
        return PoolingPart(self, sums, [group.pack(packer) for group in groups.values()])

    def pool(self, part: PoolingPart, arrays: Sequence[Tensor], hidden: Tensor) -> list[Tensor]:
        """See `PoolingPart.after_sample`."""
        if part.sums is not None:
            self._add(part.sums, arrays, hidden)
        return [self._results(group, arrays, hidden) for group in part.groups]

    def _add(self, sums: Sums, arrays: Sequence[Tensor], hidden: Tensor) -> None:
        assert self._sums is not None
        states, slots = hidden.index_select(0, arrays[sums.hidden_rows]).float(), arrays[sums.slots]
        added = torch.segment_reduce(states, "sum", lengths=arrays[sums.lengths])
        before = self._sums.index_select(0, slots).masked_fill_(arrays[sums.is_first].bool()[:, None], 0.0)
        self._sums.index_copy_(0, slots, before + added)

    def _results(self, group: PooledGroup, arrays: Sequence[Tensor], hidden: Tensor) -> Tensor:
        rows = arrays[group.rows]
        if group.token_ids is not None:
            logits = self._model.compute_logits(hidden.index_select(0, rows)).float()
            chosen = logits.gather(1, arrays[group.token_ids].view(len(rows), -1))
            return chosen - logits.logsumexp(dim=-1, keepdim=True)
        if group.counts is None:
            vectors = hidden.index_select(0, rows).float()
        else:
            assert self._sums is not None
            vectors = self._sums.index_select(0, rows) / arrays[group.counts][:, None]
        return self._heads(vectors, group.task, dimensions=group.dimensions, use_activation=group.use_activation)


def _pack_sums(parts: list[IntArray], slots: list[int], is_first: list[int], packer: Packer) -> Sums | None:
    if not parts:
        return None
    return Sums(
        hidden_rows=packer.add(np.concatenate(parts)),
        lengths=packer.add(np.array([part.size for part in parts], np.int64)),
        slots=packer.add(np.array(slots, np.int64)),
        is_first=packer.add(np.array(is_first, np.int64)),
    )
