"""LogprobColumns: for which sampled and prompt tokens requests want log probabilities. Host work."""

from dataclasses import dataclass

import numpy as np

from proa_engine.core.types import NewRequestData
from proa_engine.step.columns import Columns, Rows, Samples
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray, Packer, RowSet

_NONE = -1  # not requested


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


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Prompt positions whose next token's log probability is requested, over all requests."""

    hidden_rows: int  # staged index: row of the hidden states
    targets: int  # staged index: flat position of the next token in the token table
    requests: list[tuple[str, range, int]]  # request id, positions, number of top tokens


class LogprobColumns(Columns):
    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self._num_top = np.full(tables.num_slots, _NONE, np.int64)
        self._num_prompt_top = np.full(tables.num_slots, _NONE, np.int64)
        self._named: dict[int, tuple[int, ...]] = {}  # by slot; only slots that name any

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        params = request.sampling_params
        self._num_top[slot] = _NONE if params.logprobs is None else params.logprobs
        self._num_prompt_top[slot] = _NONE if params.prompt_logprobs is None else params.prompt_logprobs
        if params.logprob_token_ids:
            self._named[slot] = params.logprob_token_ids

    def remove(self, slot: int) -> None:
        self._named.pop(slot, None)

    def lay_out_samples(self, rows: Rows, samples: Samples, packer: Packer) -> LogprobInputs | None:
        """Return the samples whose log probabilities are requested; None if there are none."""
        slots = rows.slots[samples.rows]
        counts = self._num_top[slots]
        row_set = RowSet.of(counts != _NONE, packer)
        if not row_set.count:
            return None
        wanted = np.flatnonzero(counts != _NONE)
        names = [rows.request_ids[row] for row in samples.rows[wanted].tolist()]
        num_top = dict(zip(names, counts[wanted].tolist(), strict=True))
        if not self._named:
            return LogprobInputs(row_set, num_top, {}, None)
        named = [self._named.get(slot, ()) for slot in slots[wanted].tolist()]
        by_name = {name: token_ids for name, token_ids in zip(names, named, strict=True) if token_ids}
        return LogprobInputs(row_set, num_top, by_name, _pack_named(named, packer) if by_name else None)

    def lay_out_prompts(self, rows: Rows, packer: Packer) -> PromptLogprobRows | None:
        """Return the prompt positions whose log probabilities are requested; None if there are none."""
        tables = self._tables
        num_positions = np.minimum(rows.ends, tables.num_prompt_tokens[rows.slots] - 1) - rows.starts
        with_logprobs = np.flatnonzero((self._num_prompt_top[rows.slots] != _NONE) & (num_positions > 0))
        if not with_logprobs.size:
            return None
        hidden_rows, targets, requests = [], [], []
        for row in with_logprobs.tolist():
            start, count = int(rows.starts[row]), int(num_positions[row])
            slot = int(rows.slots[row])
            first_target = slot * tables.token_width + start + 1
            hidden_rows.append(np.arange(rows.query_start_loc[row], rows.query_start_loc[row] + count))
            targets.append(np.arange(first_target, first_target + count))
            requests.append((rows.request_ids[row], range(start, start + count), int(self._num_prompt_top[slot])))
        return PromptLogprobRows(packer.add(np.concatenate(hidden_rows)), packer.add(np.concatenate(targets)), requests)


def _pack_named(rows: list[tuple[int, ...]], packer: Packer) -> NamedTokens:
    width = max(map(len, rows))
    padded: IntArray = np.zeros((len(rows), width), np.int64)
    for row, token_ids in zip(padded, rows, strict=True):
        row[: len(token_ids)] = token_ids
    return NamedTokens(packer.add(padded.reshape(-1)), width)
