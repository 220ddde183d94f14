"""Which hidden states of a step are pooled, and for which requests. Host work; the results are staged index arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from proa.contract import PoolingParams, PoolingTask
from proa_engine.core.types import NewRequestData
from proa_engine.models.pooling_config import PoolingKind
from proa_engine.worker.columns import Columns, Rows
from proa_engine.worker.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class Sums:
    """Hidden states that are added to the sums of their requests, [tokens], grouped by request. Staged indices."""

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
class PoolingInputs:
    sums: Sums | None
    groups: list[PooledGroup]


@dataclass(slots=True)
class _Group:
    """A `PooledGroup` on the host, while it is made."""

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
    """`kinds`: by task, which hidden states are pooled."""

    def __init__(self, kinds: Mapping[PoolingTask, PoolingKind]) -> None:
        self._kinds = kinds
        self._params: dict[int, PoolingParams] = {}  # only slots of pooled requests

    def add(self, slot: int, request: NewRequestData) -> None:
        if request.pooling_params is not None:
            self._params[slot] = request.pooling_params

    def remove(self, slot: int) -> None:
        self._params.pop(slot, None)

    def lay_out(self, rows: Rows, num_prompt_tokens: IntArray, packer: Packer) -> PoolingInputs | None:
        """`num_prompt_tokens` [rows]. None if the step neither returns nor sums anything of a pooled request."""
        if not self._params:
            return None
        groups: dict[tuple[object, ...], _Group] = {}
        parts: list[IntArray] = []  # of the sums
        slots: list[int] = []
        is_first: list[int] = []
        for row, slot in enumerate(rows.slots.tolist()):
            params = self._params.get(slot)
            if params is None:
                continue
            kind = self._kinds[params.task]
            start, num_tokens = int(rows.starts[row]), int(num_prompt_tokens[row])
            hidden_rows = np.arange(rows.query_start_loc[row], rows.query_start_loc[row + 1])
            if kind is PoolingKind.MEAN or (kind is PoolingKind.FIRST and start == 0):
                parts.append(hidden_rows[:1] if kind is PoolingKind.FIRST else hidden_rows)
                slots.append(slot)
                is_first.append(int(start == 0))
            if kind is not PoolingKind.ALL and rows.ends[row] < num_tokens:
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
                group.counts.append(num_tokens if kind is PoolingKind.MEAN else 1)
            if num_values:
                group.token_ids.append(params.score_token_ids)
        if not (groups or parts):
            return None
        return PoolingInputs(
            _pack_sums(parts, slots, is_first, packer), [group.pack(packer) for group in groups.values()]
        )

    def token_types(self, rows: Rows, positions: IntArray, packer: Packer) -> int | None:
        """Staged index of each token's type, [tokens]: 1 in the second text of a pair. None if the step has no pair.

        `positions` [tokens] are those of the tokens in their requests.
        """
        pooling = [self._params.get(slot) for slot in rows.slots.tolist()]
        starts = [None if params is None else params.second_segment_start for params in pooling]
        if all(start is None for start in starts):
            return None
        never = int(positions.max()) + 1
        first = np.array([never if start is None else start for start in starts], np.int64)
        counts = np.diff(rows.query_start_loc)
        return packer.add((positions >= np.repeat(first, counts)).astype(np.int64))


def _pack_sums(parts: list[IntArray], slots: list[int], is_first: list[int], packer: Packer) -> Sums | None:
    if not parts:
        return None
    return Sums(
        hidden_rows=packer.add(np.concatenate(parts)),
        lengths=packer.add(np.array([part.size for part in parts], np.int64)),
        slots=packer.add(np.array(slots, np.int64)),
        is_first=packer.add(np.array(is_first, np.int64)),
    )
