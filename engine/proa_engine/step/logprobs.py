"""Log probabilities of sampled and prompt tokens: which requests want them, and what the device computes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

import numpy as np
import torch
from torch import Tensor

from proa.contract import TokenLogprobs
from proa_engine.core.types import NewRequestData
from proa_engine.kernels.sampling import sampling_reference as sampling
from proa_engine.step.columns import Columns, Computed, Rows, StepLayout, StepOutputs, StepPart
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray, Packer, RowSet

# Logits of prompt tokens are computed in slices of this many bytes: those of a long prompt do not fit into memory.
_PROMPT_LOGITS_BYTES = 64 * 1024 * 1024
_NONE = -1  # not requested
_Row = tuple[TokenLogprobs, Sequence[float]]


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log probabilities of some rows' tokens, [rows], and of their most likely tokens, [rows, num_top].

    `named` are those of the tokens that requests name, [rows, width]; None if no request names any.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor
    named: Tensor | None = None


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The tokens whose log probabilities requests name, [rows with log probabilities, width], padded with zeros."""

    index: int  # staged
    width: int


@dataclass(frozen=True, slots=True)
class LogprobInputs:
    """Samples of a step whose log probabilities are requested."""

    rows: RowSet  # of the samples
    num_top: dict[str, int]  # request id -> number of top tokens, in row order
    named: dict[str, tuple[int, ...]]  # request id -> the tokens that it names instead of top tokens
    named_tokens: NamedTokens | None  # None: `named` is empty


class LogprobReader:
    """The log probabilities of a step's samples on the host, consumed in the order of the rows."""

    def __init__(self, tensors: LogprobTensors, inputs: LogprobInputs) -> None:
        self._inputs = inputs
        self._rows = _rows(tensors, max(inputs.num_top.values()))

    def take(self, name: str, num_samples: int) -> list[TokenLogprobs]:
        """Return those of the request's next samples; none if it requests none."""
        if name not in self._inputs.num_top:
            return []
        num_top, named = self._inputs.num_top[name], self._inputs.named.get(name, ())
        return [_cut(row, num_top, named) for row in islice(self._rows, num_samples)]


class LogprobColumns:
    """Which sampled tokens' log probabilities requests want. Owned by `SamplingColumns`: the sampler computes them."""

    def __init__(self, tables: SlotTables) -> None:
        self.users: set[int] = set()  # the slots that want some
        self._num_top = np.full(tables.num_slots, _NONE, np.int64)
        self._named: dict[int, tuple[int, ...]] = {}  # by slot; only slots that name any

    def add(self, request: NewRequestData, slot: int) -> None:
        params = request.sampling_params
        self._num_top[slot] = _NONE if params.logprobs is None else params.logprobs
        if params.logprobs is not None:
            self.users.add(slot)
        if params.logprob_token_ids:
            self._named[slot] = params.logprob_token_ids

    def remove(self, slot: int) -> None:
        self.users.discard(slot)
        self._named.pop(slot, None)

    def lay_out_samples(self, rows: Rows, sample_rows: IntArray, packer: Packer) -> LogprobInputs | None:
        """Return the samples whose log probabilities are requested; None if there are none. `sample_rows` [samples]:
        the step's row of each sample."""
        slots = rows.slots[sample_rows]
        counts = self._num_top[slots]
        row_set = RowSet.of(counts != _NONE, packer)
        if not row_set.count:
            return None
        wanted = np.flatnonzero(counts != _NONE)
        names = [rows.request_ids[row] for row in sample_rows[wanted].tolist()]
        num_top = dict(zip(names, counts[wanted].tolist(), strict=True))
        if not self._named:
            return LogprobInputs(row_set, num_top, {}, None)
        named = [self._named.get(slot, ()) for slot in slots[wanted].tolist()]
        by_name = {name: token_ids for name, token_ids in zip(names, named, strict=True) if token_ids}
        return LogprobInputs(row_set, num_top, by_name, _pack_named(named, packer) if by_name else None)


@dataclass(frozen=True, slots=True)
class PromptLogprobPart(StepPart):
    """Prompt positions whose next token's log probability is requested, over all requests."""

    reads_hidden = True

    columns: "PromptLogprobColumns"
    hidden_rows: int  # staged index: row of the hidden states
    targets: int  # staged index: flat position of the next token in the token table
    requests: list[tuple[str, range, int]]  # request id, positions, number of top tokens

    def after_sample(self, arrays: Sequence[Tensor], computed: Computed, token_ids: Tensor | None) -> list[Tensor]:
        """Return the first five tensors of `LogprobTensors`, for all positions."""
        return self.columns.compute(computed.hidden, arrays[self.hidden_rows], arrays[self.targets])

    def add_results(self, results: list[Tensor], outputs: StepOutputs) -> None:
        rows = _rows(LogprobTensors(*results), max(num_top for _, _, num_top in self.requests))
        for name, positions, num_top in self.requests:
            output = outputs.others[name]
            output.prompt_logprobs = [_cut(next(rows), num_top) for _ in positions]
            output.prompt_logprobs_end = positions.stop


class PromptLogprobColumns(Columns):
    """Which requests want log probabilities of their prompts' tokens."""

    def __init__(self, tables: SlotTables, compute_logits: Callable[[Tensor], Tensor], max_logprobs: int) -> None:
        """`compute_logits` is the model's. Each position gets the `max_logprobs` most likely tokens."""
        self._tables = tables
        self._compute_logits = compute_logits
        self._max_logprobs = max_logprobs
        self._users: set[int] = set()  # the slots that want some
        self._num_top = np.full(tables.num_slots, _NONE, np.int64)

    @property
    def is_used(self) -> bool:
        return bool(self._users)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        num_top = request.sampling_params.prompt_logprobs
        self._num_top[slot] = _NONE if num_top is None else num_top
        if num_top is not None:
            self._users.add(slot)

    def remove(self, slot: int) -> None:
        self._users.discard(slot)

    def graph_shape(self, rows: Rows, shape: GraphShape) -> GraphShape | None:
        """Return None if a row has positions: a graph's rows have no logits of prompts."""
        return None if self._num_positions(rows).any() else shape

    def lay_out_part(self, step: StepLayout, packer: Packer) -> PromptLogprobPart | None:
        rows, hidden_rows, targets, requests = step.rows, [], [], []
        num_positions = self._num_positions(rows)
        for row in np.flatnonzero(num_positions).tolist():
            slot, start, count = int(rows.slots[row]), int(rows.starts[row]), int(num_positions[row])
            first_target = slot * self._tables.token_width + start + 1
            hidden_rows.append(np.arange(rows.query_start_loc[row], rows.query_start_loc[row] + count))
            targets.append(np.arange(first_target, first_target + count))
            requests.append((rows.request_ids[row], range(start, start + count), int(self._num_top[slot])))
        if not requests:
            return None
        packed = packer.add(np.concatenate(hidden_rows)), packer.add(np.concatenate(targets))
        return PromptLogprobPart(self, *packed, requests)

    def compute(self, hidden: Tensor, hidden_rows: Tensor, targets: Tensor) -> list[Tensor]:
        """See `PromptLogprobPart.after_sample`. Computed in slices of `_PROMPT_LOGITS_BYTES`."""
        num_rows = max(8, _PROMPT_LOGITS_BYTES // (4 * self._tables.vocab_size))
        token_ids = self._tables.flat_token_ids[targets].long()
        slices = zip(hidden_rows.split(num_rows), token_ids.split(num_rows), strict=True)
        parts = [
            sampling.token_logprobs(self._compute_logits(hidden.index_select(0, rows)).float(), ids, self._max_logprobs)
            for rows, ids in slices
        ]
        return [token_ids, *map(torch.cat, zip(*parts, strict=True))]

    def _num_positions(self, rows: Rows) -> IntArray:
        """Return the number of positions of each row, [rows], which begin at the row's first token."""
        num_positions = np.minimum(rows.ends, self._tables.num_prompt_tokens[rows.slots] - 1) - rows.starts
        return np.where(self._num_top[rows.slots] == _NONE, 0, np.maximum(num_positions, 0))


def _pack_named(rows: list[tuple[int, ...]], packer: Packer) -> NamedTokens:
    width = max(map(len, rows))
    padded: IntArray = np.zeros((len(rows), width), np.int64)
    for row, token_ids in zip(padded, rows, strict=True):
        row[: len(token_ids)] = token_ids
    return NamedTokens(packer.add(padded.reshape(-1)), width)


def _rows(tensors: LogprobTensors, num_top: int) -> Iterator[_Row]:
    """Yield the rows of `tensors`, each with its `num_top` most likely tokens (or fewer, if the tensors have fewer) and
    the log probabilities of the tokens that its request names."""
    columns = (
        tensors.token_ids.tolist(),
        tensors.logprobs.tolist(),
        tensors.ranks.tolist(),
        tensors.top_token_ids[:, :num_top].tolist(),
        tensors.top_logprobs[:, :num_top].tolist(),
    )
    named = repeat(()) if tensors.named is None else tensors.named.tolist()
    return ((TokenLogprobs(*row), values) for row, values in zip(zip(*columns, strict=True), named, strict=False))


def _cut(row: _Row, num_top: int, token_ids: Sequence[int] = ()) -> TokenLogprobs:
    """Return the log probabilities of the row's sampled token and of `token_ids`, or of the `num_top` most likely
    tokens if the request names none."""
    entry, named = row
    if token_ids:
        return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, token_ids, named[: len(token_ids)])
    top = entry.top_token_ids[:num_top], entry.top_logprobs[:num_top]
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, *top)
