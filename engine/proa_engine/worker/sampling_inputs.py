"""Which rows of a step are sampled, with which operations, and for which log probabilities are requested.

Host work: numpy over all rows at once. The results are staged index arrays for the sampler.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proa_engine.kernels.sampling_params import LIMITS, Operation
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.staging import IntArray, Packer
from proa_engine.worker.token_rules import PackedRules, RuleRow, pack_rules

_IS_LIMIT = [operation in LIMITS for operation in Operation]


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows on the host, [rows] each: row `i` computes its request's tokens `starts[i]` up to `ends[i]`."""

    request_ids: list[str]
    slots: IntArray
    starts: IntArray
    ends: IntArray
    query_start_loc: IntArray  # [rows + 1]


@dataclass(frozen=True, slots=True)
class Samples:
    """The tokens that a step samples, in order; [samples] each."""

    rows: IntArray  # of the step
    positions: IntArray  # position of the new token in its request
    hidden_rows: IntArray  # row of the hidden states


def last_samples(rows: Rows, sampled: IntArray) -> Samples:
    """One sample for each row in `sampled`, after the row's last token."""
    return Samples(sampled, rows.ends[sampled], rows.query_start_loc[1:][sampled] - 1)


@dataclass(frozen=True, slots=True)
class RowSet:
    """A subset of some rows: their number and the staged index of their row numbers, None if it is all rows."""

    count: int
    index: int | None


@dataclass(frozen=True, slots=True)
class LogprobTokenIds:
    """The tokens whose log probabilities requests name, [rows with log probabilities, width], padded with zeros."""

    index: int  # staged
    width: int


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Prompt positions whose next token's log probability is requested, over all requests."""

    hidden_rows: int  # staged index: row of the hidden states
    targets: int  # staged index: flat position of the next token in the token table
    requests: list[tuple[str, int, int]]  # request id, number of positions, number of top tokens


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The tokens sampled in this step, one row of logits each, and the operations that they need."""

    num_rows: int
    rows: IntArray  # [num_rows], on the host: the step's row of each sample, ascending
    hidden_rows: int | None  # staged index; None: a token is sampled after every token of the step
    slots: int  # staged index
    positions: int  # staged index: position of the new token in its request
    write_to: int  # staged index: its flat position in the token table
    max_num_tokens: int  # most tokens before a sample, for penalties; 0 if no row has any
    random: RowSet
    needs: list[RowSet]  # by operation: of all rows, for LIMITS of the random rows
    logprobs: RowSet
    logprob_token_ids: LogprobTokenIds | None  # None: no row has any
    rules: PackedRules | None


def sampling_inputs(rows: Rows, samples: Samples, batch: InputBatch, packer: Packer) -> SamplingInputs:
    slots = rows.slots[samples.rows]
    positions = samples.positions
    is_random = batch.is_random[slots]
    random_slots = slots[is_random]
    needs = [
        _row_set(needs[random_slots if is_limit else slots], packer)
        for needs, is_limit in zip(batch.needs, _IS_LIMIT, strict=True)
    ]
    return SamplingInputs(
        num_rows=slots.size,
        rows=samples.rows,
        hidden_rows=None if slots.size == rows.query_start_loc[-1] else packer.add(samples.hidden_rows),
        slots=packer.add(slots),
        positions=packer.add(positions),
        write_to=packer.add(slots * batch.token_width + positions),
        max_num_tokens=int(positions.max()) if needs[Operation.PENALTIES].count else 0,
        random=_row_set(is_random, packer),
        needs=needs,
        logprobs=_row_set(batch.num_logprobs[slots] >= 0, packer),
        logprob_token_ids=_pack_logprob_token_ids(slots, batch, packer) if batch.logprob_token_ids else None,
        rules=_pack_rules(slots, positions, batch, packer) if batch.rules else None,
    )


def _row_set(mask: npt.NDArray[np.bool_], packer: Packer) -> RowSet:
    count = int(np.count_nonzero(mask))
    return RowSet(count, packer.add(np.flatnonzero(mask)) if 0 < count < mask.size else None)


def _pack_logprob_token_ids(slots: IntArray, batch: InputBatch, packer: Packer) -> LogprobTokenIds | None:
    rows = [batch.logprob_token_ids.get(slot, ()) for slot in slots[batch.num_logprobs[slots] >= 0].tolist()]
    width = max(map(len, rows), default=0)
    if not width:
        return None
    padded = np.zeros((len(rows), width), np.int64)
    for row, token_ids in zip(padded, rows, strict=True):
        row[: len(token_ids)] = token_ids
    return LogprobTokenIds(packer.add(padded.reshape(-1)), width)


def _pack_rules(slots: IntArray, positions: IntArray, batch: InputBatch, packer: Packer) -> PackedRules | None:
    rule_rows = (
        RuleRow(
            row=row,
            history_start=slot * batch.token_width,
            num_tokens=int(positions[row]),
            num_output_tokens=int(positions[row] - batch.num_prompt_tokens[slot]),
            rules=rules,
        )
        for row, slot in enumerate(slots.tolist())
        if (rules := batch.rules.get(slot)) is not None
    )
    return pack_rules(rule_rows, batch.vocab_size, packer)


def num_logprobs(rows: Rows, sampled: IntArray, batch: InputBatch) -> dict[str, int]:
    """Request id -> number of top tokens, for the sampled rows that request log probabilities."""
    counts = batch.num_logprobs[rows.slots[sampled]]
    if (counts < 0).all():
        return {}
    with_logprobs = sampled[counts >= 0]
    request_ids = (rows.request_ids[row] for row in with_logprobs.tolist())
    return dict(zip(request_ids, counts[counts >= 0].tolist(), strict=True))


def logprob_token_ids(rows: Rows, sampled: IntArray, batch: InputBatch) -> dict[str, tuple[int, ...]]:
    """Request id -> the tokens that it names, for the sampled rows that name any."""
    if not batch.logprob_token_ids:
        return {}
    named = ((row, batch.logprob_token_ids.get(int(rows.slots[row]))) for row in sampled.tolist())
    return {rows.request_ids[row]: token_ids for row, token_ids in named if token_ids}


def prompt_logprob_rows(rows: Rows, batch: InputBatch, packer: Packer) -> PromptLogprobRows | None:
    num_positions = np.minimum(rows.ends, batch.num_prompt_tokens[rows.slots] - 1) - rows.starts
    with_logprobs = np.flatnonzero((batch.num_prompt_logprobs[rows.slots] >= 0) & (num_positions > 0))
    if not with_logprobs.size:
        return None
    hidden_rows, targets, requests = [], [], []
    for row in with_logprobs.tolist():
        count = int(num_positions[row])
        slot = int(rows.slots[row])
        first_target = slot * batch.token_width + int(rows.starts[row]) + 1
        hidden_rows.append(np.arange(rows.query_start_loc[row], rows.query_start_loc[row] + count))
        targets.append(np.arange(first_target, first_target + count))
        requests.append((rows.request_ids[row], count, int(batch.num_prompt_logprobs[slot])))
    return PromptLogprobRows(packer.add(np.concatenate(hidden_rows)), packer.add(np.concatenate(targets)), requests)
