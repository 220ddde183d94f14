"""StepInputs: a planned step as arrays. Pure host work: numpy over all rows at once, one copy to the device.

Rows are the step's requests in the plan's order. Knows the InputBatch's columns, not its device tables.
"""

from dataclasses import dataclass

import numpy as np

from proa_engine.core.types import SchedulerOutput
from proa_engine.worker.decode_graphs import DecodeGraphs, pad_rows
from proa_engine.worker.draft_inputs import DraftInputs, lay_out_drafts
from proa_engine.worker.input_batch import BatchEdits, InputBatch
from proa_engine.worker.sampling_inputs import (
    PromptLogprobRows,
    Rows,
    SamplingInputs,
    last_samples,
    num_logprobs,
    prompt_logprob_rows,
    sampling_inputs,
)
from proa_engine.worker.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class PackedEdits:
    """Places of what changes in the device tables. Token rows stay apart: one long slice copy each."""

    tokens: list[tuple[int, int]]  # flat start in the token table, place
    blocks: tuple[int, int] | None  # flat positions, ids
    params: tuple[int, int] | None  # slots, rows


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Any batch, token by token: places, and what the host knows of it."""

    num_decodes: int
    max_seq_len: int
    positions: int
    token_positions: int  # flat in the token table
    block_positions: int  # flat in the block table, the block of each token
    block_offsets: int
    slots: int
    query_start_loc: int
    seq_lens: int


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A batch of decodes for which there is a recording of this size: the device works out the rest."""

    size: int
    slots_and_positions: int  # place, of `pad_rows`


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that one step needs; what is a place refers to `packer`."""

    packer: Packer
    num_tokens: int
    edits: PackedEdits
    request_ids: list[str]
    is_sampled: list[bool]  # which of them get a token in this step
    num_logprobs: dict[str, int]  # request id -> number of likeliest wanted, in the order of their rows
    rows: TokenRows | DecodeRows
    sampling: SamplingInputs | None
    prompt_logprobs: PromptLogprobRows | None
    drafts: DraftInputs | None  # None: the batch has no drafts in any step


def build_step_inputs(
    plan: SchedulerOutput, batch: InputBatch, block_size: int, vocab_size: int, graphs: DecodeGraphs | None = None
) -> StepInputs | None:
    """Apply the plan to the batch's host side and lay the step out; None where the plan computes nothing.

    Changes `batch`: afterwards it counts this step's tokens as computed and its samples as tokens.
    """
    edits = _apply_plan(plan, batch)
    if plan.is_empty:
        return None
    rows, counts = _rows(plan, batch)
    packer = Packer()
    is_sampled = rows.ends >= batch.num_tokens[rows.slots]
    sampled_rows = np.flatnonzero(is_sampled)
    drafts, samples = None, last_samples(rows, sampled_rows)
    if batch.max_drafts:
        drafts, samples = lay_out_drafts(rows, counts, is_sampled, batch, edits, packer)
    prompt_logprobs = prompt_logprob_rows(rows, batch, packer)
    size = None
    if graphs is not None and counts.size == plan.total_num_scheduled_tokens and prompt_logprobs is None:
        size = graphs.size_for(counts.size)
    inputs = StepInputs(
        packer=packer,
        num_tokens=plan.total_num_scheduled_tokens,
        edits=_pack_edits(edits, packer),
        request_ids=rows.request_ids,
        is_sampled=is_sampled.tolist(),
        num_logprobs=num_logprobs(rows, sampled_rows, batch),
        rows=_token_rows(rows, counts, batch, block_size, packer)
        if size is None
        else DecodeRows(size, packer.add(pad_rows(rows.slots, rows.starts, size))),
        sampling=sampling_inputs(rows, samples, batch, vocab_size, packer) if sampled_rows.size else None,
        prompt_logprobs=prompt_logprobs,
        drafts=drafts,
    )
    batch.num_computed_tokens[rows.slots] = rows.ends
    batch.num_tokens[rows.slots[sampled_rows]] += 1
    return inputs


def _token_rows(rows: Rows, counts: IntArray, batch: InputBatch, block_size: int, packer: Packer) -> TokenRows:
    positions = np.arange(rows.query_start_loc[-1]) - np.repeat(rows.query_start_loc[:-1] - rows.starts, counts)
    token_slots = np.repeat(rows.slots, counts)
    return TokenRows(
        num_decodes=int(np.count_nonzero(counts == 1)),
        max_seq_len=int(rows.ends.max()),
        positions=packer.add(positions),
        token_positions=packer.add(token_slots * batch.token_width + positions),
        block_positions=packer.add(token_slots * batch.max_blocks + positions // block_size),
        block_offsets=packer.add(positions % block_size),
        slots=packer.add(rows.slots),
        query_start_loc=packer.add(rows.query_start_loc),
        seq_lens=packer.add(rows.ends),
    )


def _apply_plan(plan: SchedulerOutput, batch: InputBatch) -> BatchEdits:
    """Forget who left, take in who is new: on the host now, on the device with the edits that are returned."""
    edits = BatchEdits()
    for request_id in plan.finished_request_ids:
        batch.remove(request_id)
    for request_id in plan.preempted_request_ids:
        batch.remove(request_id)
    for new in plan.new_requests:
        batch.add(new, edits)
    batch.update(plan.cached_requests, edits)
    return edits


def _rows(plan: SchedulerOutput, batch: InputBatch) -> tuple[Rows, IntArray]:
    """The step's rows, and how many tokens each computes."""
    request_ids = list(plan.num_scheduled_tokens)
    counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(request_ids))
    assert (counts[: np.count_nonzero(counts == 1)] == 1).all(), "attention wants rows of one token first"
    slots = batch.slots_of(request_ids)
    starts = batch.num_computed_tokens[slots]
    ends = starts + counts
    assert batch.max_drafts or (ends <= batch.num_tokens[slots]).all(), (
        "a plan may not compute tokens that do not exist"
    )
    query_start_loc = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(counts, out=query_start_loc[1:])
    return Rows(request_ids, slots, starts, ends, query_start_loc), counts


def _pack_edits(edits: BatchEdits, packer: Packer) -> PackedEdits:
    blocks = params = None
    if edits.block_ids:
        blocks = packer.add(np.concatenate(edits.block_positions)), packer.add(np.concatenate(edits.block_ids))
    if edits.param_slots:
        params = packer.add(np.array(edits.param_slots, np.int64)), packer.add_floats(np.array(edits.param_rows))
    tokens = [(start, packer.add(row)) for start, row in zip(edits.token_starts, edits.token_rows, strict=True)]
    return PackedEdits(tokens, blocks, params)
