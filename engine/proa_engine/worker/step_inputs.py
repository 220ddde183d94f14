"""StepInputs: a SchedulerOutput as arrays. Host work: numpy over all rows at once, one copy to the device.

A step's rows are its requests: those of one token, then the others, in the scheduler's order.
"""

from dataclasses import dataclass, replace

import numpy as np

from proa_engine.core.types import SchedulerOutput
from proa_engine.kernels.sampling_params import Operation
from proa_engine.worker.columns import Rows, Samples, last_samples
from proa_engine.worker.decode_graphs import DecodeGraphs, GraphShape, pad_rows
from proa_engine.worker.draft_inputs import DraftInputs, count_drafts, lay_out_drafts, token_moves
from proa_engine.worker.image_encodings import EncoderWork
from proa_engine.worker.image_inputs import ImageInputs
from proa_engine.worker.input_batch import InputBatch, PackedEdits
from proa_engine.worker.logprob_inputs import LogprobTokenIds, PromptLogprobRows
from proa_engine.worker.pooling_inputs import PoolingInputs
from proa_engine.worker.sampling_inputs import RowSet
from proa_engine.worker.staging import IntArray, PackedArrays, Packer
from proa_engine.worker.state_inputs import Segments, StateInputs
from proa_engine.worker.token_rules import PackedRules


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


@dataclass(frozen=True, slots=True)
class TokenRows:
    """A batch of any kind, token by token: staged indices and what the host knows. [tokens] unless noted."""

    num_decodes: int
    max_seq_len: int
    positions: int
    token_positions: int  # flat in the token table
    block_positions: int  # flat in each block table: the block of each token
    block_offsets: int
    slots: int  # [rows]
    query_start_loc: int  # [rows + 1]
    seq_lens: int  # [rows]
    states: StateInputs | None
    lora_slots: int | None  # -1: none; None: no token has one
    token_types: int | None
    images: ImageInputs | None  # None: no token stands for an image
    rotary_positions: int | None  # [3 * tokens]; None: `positions`


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A batch of decodes only, for which a graph of this shape was captured; the device computes the rest."""

    shape: GraphShape
    rows: int  # staged index of what `pad_rows` made


@dataclass(slots=True)
class StepInputs:
    """The inputs of one step, read-only. Staged indices refer to `arrays`."""

    arrays: PackedArrays
    num_tokens: int
    edits: PackedEdits
    request_ids: list[str]
    is_sampled: list[bool]  # by row: whether it samples a token in this step
    num_logprobs: dict[str, int]  # request id -> number of top tokens, in row order
    logprob_token_ids: dict[str, tuple[int, ...]]  # request id -> the tokens that it names instead
    rows: TokenRows | DecodeRows
    sampling: SamplingInputs | None
    is_constrained: bool  # whether a row samples under a grammar
    prompt_logprobs: PromptLogprobRows | None
    drafts: DraftInputs | None  # None: speculation is off
    pooling: PoolingInputs | None = None
    encoder_work: EncoderWork | None = None  # before the forward pass


def build_step_inputs(
    scheduler_output: SchedulerOutput, batch: InputBatch, graphs: DecodeGraphs | None = None
) -> StepInputs | None:
    """Apply the scheduler's output to the batch's host side and lay out the step; None if it computes no tokens.

    Afterwards `batch` counts the step's tokens as computed and its samples as tokens.
    """
    _update_batch(scheduler_output, batch)
    if scheduler_output.is_empty:
        return None
    rows, counts = _rows(scheduler_output, batch)
    packer = Packer()
    is_sampled = rows.ends >= batch.num_tokens[rows.slots]
    sampled_rows = np.flatnonzero(is_sampled)
    num_prompt_tokens = batch.num_prompt_tokens[rows.slots]
    prompt_logprobs = batch.logprobs.lay_out_prompts(rows, num_prompt_tokens, batch.token_width, packer)
    pooling = batch.pooling.lay_out(rows, num_prompt_tokens, packer) if batch.pooling is not None else None
    num_planned = count_drafts(rows, counts, batch) if batch.max_drafts else None
    lora_slots = batch.loras.lay_out(rows) if batch.loras is not None else None
    segments = batch.states.lay_out(rows, scheduler_output.states) if batch.states is not None else None
    shape = None
    if prompt_logprobs is None and pooling is None and not (batch.images is not None and batch.images.reads(rows)):
        shape = _graph_shape(counts, num_planned, graphs, has_loras=lora_slots is not None)
    token_rows: TokenRows | DecodeRows
    if shape is None:
        token_rows = _token_rows(rows, counts, segments, lora_slots, batch, packer)
    else:
        rows = replace(rows, query_start_loc=np.arange(0, (counts.size + 1) * shape.width, shape.width))
        states = None if segments is None else (segments.read, segments.write)
        token_rows = DecodeRows(
            shape, packer.add(pad_rows(rows.slots, rows.ends, counts, shape.num_rows, states, lora_slots))
        )
    drafts, samples = None, last_samples(rows, sampled_rows)
    if num_planned is not None:
        moves = token_moves(rows, counts, num_planned, packer) if shape is None else None
        drafts, samples = lay_out_drafts(rows, sampled_rows, num_planned, batch.new_requests, moves, packer)
    sampling = sampling_inputs(rows, samples, batch, packer) if sampled_rows.size else None
    edits = batch.pack_edits(packer)
    inputs = StepInputs(
        arrays=packer.pack(),
        num_tokens=scheduler_output.total_num_scheduled_tokens,
        edits=edits,
        request_ids=rows.request_ids,
        is_sampled=is_sampled.tolist(),
        num_logprobs=batch.logprobs.num_tops(rows, sampled_rows),
        logprob_token_ids=batch.logprobs.token_ids(rows, sampled_rows),
        rows=token_rows,
        sampling=sampling,
        is_constrained=bool(scheduler_output.grammar_rows),
        prompt_logprobs=prompt_logprobs,
        drafts=drafts,
        pooling=pooling,
        encoder_work=encoder_work(scheduler_output),
    )
    batch.num_computed_tokens[rows.slots] = rows.ends
    batch.num_tokens[rows.slots[sampled_rows]] += 1
    return inputs


def encoder_work(scheduler_output: SchedulerOutput) -> EncoderWork | None:
    """The images that the step encodes before its forward pass, and those whose encodings it frees."""
    if not scheduler_output.freed_images and not scheduler_output.encoder_inputs:
        return None
    return EncoderWork(scheduler_output.freed_images, scheduler_output.encoder_inputs)


def sampling_inputs(rows: Rows, samples: Samples, batch: InputBatch, packer: Packer) -> SamplingInputs:
    slots, positions = rows.slots[samples.rows], samples.positions
    random, needs = batch.sampling.lay_out(slots, packer)
    logprobs, token_ids = batch.logprobs.lay_out(slots, packer)
    return SamplingInputs(
        num_rows=slots.size,
        rows=samples.rows,
        hidden_rows=None if slots.size == rows.query_start_loc[-1] else packer.add(samples.hidden_rows),
        slots=packer.add(slots),
        positions=packer.add(positions),
        write_to=packer.add(slots * batch.token_width + positions),
        max_num_tokens=int(positions.max()) if needs[Operation.PENALTIES].count else 0,
        random=random,
        needs=needs,
        logprobs=logprobs,
        logprob_token_ids=token_ids,
        rules=batch.rules.lay_out(slots, positions, batch.num_prompt_tokens[slots], sizes=batch, packer=packer),
    )


def _graph_shape(
    counts: IntArray, num_planned: IntArray | None, graphs: DecodeGraphs | None, *, has_loras: bool
) -> GraphShape | None:
    """The shape of the graph for a step; None if not all rows are decodes, or if none was captured for that many."""
    num_drafts = 0 if num_planned is None else num_planned.sum()
    if graphs is None or counts.size + num_drafts != counts.sum():
        return None
    return graphs.shape_for(counts.size, int(counts.max()), has_loras=has_loras)


def _token_rows(
    rows: Rows,
    counts: IntArray,
    segments: Segments | None,
    lora_slots: IntArray | None,
    batch: InputBatch,
    packer: Packer,
) -> TokenRows:
    positions = np.arange(rows.query_start_loc[-1]) - np.repeat(rows.query_start_loc[:-1] - rows.starts, counts)
    token_slots = np.repeat(rows.slots, counts)
    return TokenRows(
        num_decodes=int(np.count_nonzero(counts == 1)),
        max_seq_len=int(rows.ends.max()),
        positions=packer.add(positions),
        token_positions=packer.add(token_slots * batch.token_width + positions),
        block_positions=packer.add(token_slots * batch.max_blocks + positions // batch.block_size),
        block_offsets=packer.add(positions % batch.block_size),
        slots=packer.add(rows.slots),
        query_start_loc=packer.add(rows.query_start_loc),
        seq_lens=packer.add(rows.ends),
        states=None if segments is None else segments.pack(packer),
        lora_slots=None if lora_slots is None else packer.add(np.repeat(lora_slots, counts)),
        token_types=batch.pooling.token_types(rows, positions, packer) if batch.pooling is not None else None,
        images=batch.images.lay_out(rows, positions, packer) if batch.images is not None else None,
        rotary_positions=batch.images.rotary_positions(rows, positions, packer) if batch.images is not None else None,
    )


def _update_batch(scheduler_output: SchedulerOutput, batch: InputBatch) -> None:
    """Remove finished and preempted requests and add new ones, on the host."""
    for request_id in scheduler_output.finished_request_ids:
        batch.remove(request_id)
    for request_id in scheduler_output.preempted_request_ids:
        batch.remove(request_id)
    for new in scheduler_output.new_requests:
        batch.add(new)
    batch.update(scheduler_output.cached_requests)


def _rows(scheduler_output: SchedulerOutput, batch: InputBatch) -> tuple[Rows, IntArray]:
    """The step's rows, and the number of tokens that each computes, [rows]."""
    request_ids = [*scheduler_output.decode_request_ids, *scheduler_output.num_chunk_tokens]
    counts = np.ones(len(request_ids), np.int64)
    counts[len(scheduler_output.decode_request_ids) :] = list(scheduler_output.num_chunk_tokens.values())
    slots = batch.slots_of(request_ids)
    starts = batch.num_computed_tokens[slots]
    ends = starts + counts
    assert batch.max_drafts or (ends <= batch.num_tokens[slots]).all(), "a step cannot compute tokens that do not exist"
    query_start_loc = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(counts, out=query_start_loc[1:])
    return Rows(request_ids, slots, starts, ends, query_start_loc), counts
