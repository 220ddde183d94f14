"""StepInputs: a planned step as arrays. Pure host work: numpy over all rows at once, one copy to the device.

Rows are the step's requests in the plan's order. Knows the InputBatch's columns, not its device tables.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proa_engine.core.types import SchedulerOutput
from proa_engine.worker.input_batch import BatchEdits, InputBatch
from proa_engine.worker.staging import IntArray, Packer
from proa_engine.worker.token_rules import PackedRules, RuleRow, pack_rules


@dataclass(frozen=True, slots=True)
class RowSet:
    """Some of a set of rows: how many, and where their numbers were packed; `place` is None when it is all of them."""

    count: int
    place: int | None


@dataclass(frozen=True, slots=True)
class PackedEdits:
    """Places of what changes in the device tables. Token rows stay apart: one long slice copy each."""

    tokens: list[tuple[int, int]]  # flat start in the token table, place
    blocks: tuple[int, int] | None  # flat positions, ids
    params: tuple[int, int] | None  # slots, rows


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Prompt positions whose next token's log probability is wanted, over all requests that ask."""

    hidden_rows: int  # place: row of the hidden states
    targets: int  # place: flat position of the next token in the token table
    requests: list[tuple[str, int, int]]  # request id, number of positions, number of likeliest tokens wanted


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Which rows get a token in this step, and which of the sampler's features they use."""

    num_rows: int
    is_whole_batch: bool  # every row of the step computes one token and samples: no gathering
    hidden_rows: int  # place
    slots: int  # place
    positions: int  # place: index that the new token takes in its request
    write_to: int  # place: the same, flat in the token table
    max_num_tokens: int
    penalized: RowSet
    logprobs: RowSet
    random: RowSet
    min_p: RowSet  # of the random rows
    limited: RowSet  # of the random rows: top-k or top-p
    rules: PackedRules | None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that one step needs; what is a place refers to `packer`."""

    packer: Packer
    edits: PackedEdits
    request_ids: list[str]
    is_sampled: list[bool]  # which of them get a token in this step
    num_logprobs: dict[str, int]  # request id -> number of likeliest wanted, in the order of their rows
    num_tokens: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    positions: int
    token_positions: int  # flat in the token table
    block_positions: int  # flat in the block table, the block of each token
    block_offsets: int
    slots: int
    query_start_loc: int
    seq_lens: int
    sampling: SamplingInputs | None
    prompt_logprobs: PromptLogprobRows | None


def build_step_inputs(plan: SchedulerOutput, batch: InputBatch, block_size: int, vocab_size: int) -> StepInputs | None:
    """Apply the plan to the batch's host side and lay the step out; None where the plan computes nothing.

    Changes `batch`: afterwards it counts this step's tokens as computed and its samples as tokens.
    """
    edits = BatchEdits()
    for request_id in plan.finished_request_ids:
        batch.remove(request_id)
    for request_id in plan.preempted_request_ids:
        batch.remove(request_id)
    for new in plan.new_requests:
        batch.add(new, edits)
    batch.update(plan.cached_requests, edits)
    if plan.is_empty:
        assert not plan.new_requests
        return None

    request_ids = list(plan.num_scheduled_tokens)
    counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(request_ids))
    num_decodes = int((counts == 1).sum())
    assert (counts[:num_decodes] == 1).all(), "attention wants rows of one token first"
    slots = batch.slots_of(request_ids)
    starts = batch.num_computed_tokens[slots]
    ends = starts + counts
    assert (ends <= batch.num_tokens[slots]).all(), "a plan may not compute tokens that do not exist"
    query_start_loc = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(counts, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    positions = np.arange(num_tokens) - np.repeat(query_start_loc[:-1] - starts, counts)
    token_slots = np.repeat(slots, counts)

    packer = Packer()
    rows = _Rows(request_ids, slots, starts, ends, query_start_loc)
    is_sampled = ends == batch.num_tokens[slots]
    sampled_rows = np.flatnonzero(is_sampled)
    sampling = _sampling_inputs(rows, sampled_rows, batch, vocab_size, packer) if sampled_rows.size else None
    inputs = StepInputs(
        packer=packer,
        edits=_pack_edits(edits, packer),
        request_ids=request_ids,
        is_sampled=is_sampled.tolist(),
        num_logprobs=_num_logprobs(rows, sampled_rows, batch),
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        max_query_len=int(counts.max()),
        max_seq_len=int(ends.max()),
        positions=packer.add(positions),
        token_positions=packer.add(token_slots * batch.token_width + positions),
        block_positions=packer.add(token_slots * batch.max_blocks + positions // block_size),
        block_offsets=packer.add(positions % block_size),
        slots=packer.add(slots),
        query_start_loc=packer.add(query_start_loc),
        seq_lens=packer.add(ends),
        sampling=sampling,
        prompt_logprobs=_prompt_logprob_rows(rows, batch, packer),
    )
    batch.num_computed_tokens[slots] = ends
    batch.num_tokens[slots[sampled_rows]] += 1
    return inputs


@dataclass(frozen=True, slots=True)
class _Rows:
    """The step's rows on the host."""

    request_ids: list[str]
    slots: IntArray
    starts: IntArray
    ends: IntArray
    query_start_loc: IntArray


def _pack_edits(edits: BatchEdits, packer: Packer) -> PackedEdits:
    blocks = params = None
    if edits.block_ids:
        blocks = packer.add(np.concatenate(edits.block_positions)), packer.add(np.concatenate(edits.block_ids))
    if edits.param_slots:
        params = packer.add(np.array(edits.param_slots, np.int64)), packer.add_floats(np.array(edits.param_rows))
    tokens = [(start, packer.add(row)) for start, row in zip(edits.token_starts, edits.token_rows, strict=True)]
    return PackedEdits(tokens, blocks, params)


def _sampling_inputs(
    rows: _Rows, sampled: IntArray, batch: InputBatch, vocab_size: int, packer: Packer
) -> SamplingInputs:
    slots = rows.slots[sampled]
    positions = rows.ends[sampled]
    is_random = batch.is_random[slots]
    return SamplingInputs(
        num_rows=sampled.size,
        is_whole_batch=sampled.size == rows.query_start_loc[-1],
        hidden_rows=packer.add(rows.query_start_loc[1:][sampled] - 1),
        slots=packer.add(slots),
        positions=packer.add(positions),
        write_to=packer.add(slots * batch.token_width + positions),
        max_num_tokens=int(positions.max()),
        penalized=_row_set(batch.has_penalties[slots], packer),
        logprobs=_row_set(batch.num_logprobs[slots] >= 0, packer),
        random=_row_set(is_random, packer),
        min_p=_row_set(batch.has_min_p[slots[is_random]], packer),
        limited=_row_set(batch.limits_choice[slots[is_random]], packer),
        rules=_pack_rules(slots, positions, batch, vocab_size, packer) if batch.rules else None,
    )


def _row_set(mask: npt.NDArray[np.bool_], packer: Packer) -> RowSet:
    count = int(mask.sum())
    return RowSet(count, packer.add(np.flatnonzero(mask)) if 0 < count < mask.size else None)


def _pack_rules(
    slots: IntArray, positions: IntArray, batch: InputBatch, vocab_size: int, packer: Packer
) -> PackedRules | None:
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
    return pack_rules(rule_rows, vocab_size, packer)


def _num_logprobs(rows: _Rows, sampled: IntArray, batch: InputBatch) -> dict[str, int]:
    wanted = batch.num_logprobs[rows.slots[sampled]]
    with_logprobs = sampled[wanted >= 0]
    names = (rows.request_ids[row] for row in with_logprobs.tolist())
    return dict(zip(names, wanted[wanted >= 0].tolist(), strict=True))


def _prompt_logprob_rows(rows: _Rows, batch: InputBatch, packer: Packer) -> PromptLogprobRows | None:
    num_positions = np.minimum(rows.ends, batch.num_prompt_tokens[rows.slots] - 1) - rows.starts
    wanted = np.flatnonzero((batch.num_prompt_logprobs[rows.slots] >= 0) & (num_positions > 0))
    if not wanted.size:
        return None
    hidden_rows, targets, requests = [], [], []
    for row in wanted.tolist():
        count = int(num_positions[row])
        slot = int(rows.slots[row])
        first_target = slot * batch.token_width + int(rows.starts[row]) + 1
        hidden_rows.append(np.arange(rows.query_start_loc[row], rows.query_start_loc[row] + count))
        targets.append(np.arange(first_target, first_target + count))
        requests.append((rows.request_ids[row], count, int(batch.num_prompt_logprobs[slot])))
    return PromptLogprobRows(packer.add(np.concatenate(hidden_rows)), packer.add(np.concatenate(targets)), requests)
