"""InputBuilder: turns each SchedulerOutput into a step's inputs. Host work: numpy over all rows at once. The arrays are
copied to the device together.

If a step decodes the same requests as the one before, its inputs are those of that step with increased positions.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from proa_engine.core.types import CachedRequestData, SchedulerOutput
from proa_engine.step.columns import Rows, TokenRows, last_samples
from proa_engine.step.decode_graphs import DecodeGraphs, GraphShape, pad_rows
from proa_engine.step.drafts import DraftInputs, token_moves
from proa_engine.step.images import EncoderWork
from proa_engine.step.input_batch import InputBatch
from proa_engine.step.logprobs import PromptLogprobRows
from proa_engine.step.pooling import PoolingInputs
from proa_engine.step.prompt_graphs import PromptGraphs, PromptShape
from proa_engine.step.sampling import SamplingInputs
from proa_engine.step.slots import Edits, PackedEdits
from proa_engine.step.staging import IntArray, PackedArrays, Packer

# Fields of `StepInputs` that differ between a step and one that continues it.
_CHANGED = {"arrays", "edits", "sampling", "is_constrained", "encoder_work"}


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A batch of decodes only, with a captured graph of its shape; the device computes the other inputs."""

    shape: GraphShape
    rows: int  # staged index of what `pad_rows` made


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A batch with prompts, with a captured graph of its shape."""

    shape: PromptShape
    values: int  # staged index of what `PromptGraphs.lay_out` made


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """The inputs of one step, read-only. Staged indices refer to `arrays`."""

    arrays: PackedArrays
    num_tokens: int
    edits: PackedEdits
    request_ids: list[str]
    is_sampled: list[bool]  # by row: whether it samples a token in this step
    rows: TokenRows | DecodeRows | PromptRows
    sampling: SamplingInputs | None  # None: no row samples
    is_constrained: bool  # whether a row samples under a grammar
    prompt_logprobs: PromptLogprobRows | None
    drafts: DraftInputs | None  # None: speculation is off
    pooling: PoolingInputs | None
    encoder_work: EncoderWork | None  # before the forward pass

    @property
    def draw_shape(self) -> GraphShape | None:
        """The shape whose graph samples the step's tokens, one for each row; None if the sampler does."""
        if not isinstance(self.rows, DecodeRows) or self.drafts is not None or self.is_constrained:
            return None
        return self.rows.shape if self.sampling is not None and self.sampling.is_plain else None


def build_step_inputs(
    scheduler_output: SchedulerOutput,
    batch: InputBatch,
    graphs: DecodeGraphs | None = None,
    prompt_graphs: PromptGraphs | None = None,
) -> StepInputs | None:
    """Apply the scheduler's output to the batch's host side and lay out the step. None if it computes no tokens.

    Afterwards `batch` counts the step's tokens as computed and its samples as tokens.
    """
    edits = batch.apply(scheduler_output)
    if scheduler_output.is_empty:
        return None
    features, tables, packer = batch.features, batch.tables, Packer()
    rows = batch.rows(scheduler_output)
    is_sampled = rows.ends >= tables.num_tokens[rows.slots]
    sampled_rows = np.flatnonzero(is_sampled)
    prompt_logprobs = features.sampling.logprobs.lay_out_prompts(rows, packer)
    pooling = None if features.pooling is None else features.pooling.lay_out_results(rows, packer)
    num_planned = None if features.drafts is None else features.drafts.count_planned(rows)
    shape = None
    if prompt_logprobs is None and pooling is None and all(feature.can_replay(rows) for feature in batch.active):
        shape = _graph_shape(rows, num_planned, batch, graphs)
    token_rows: TokenRows | DecodeRows | PromptRows
    if shape is None:
        token_rows = _token_rows(rows, batch, packer, prompt_graphs)
    else:
        token_rows = _decode_rows(rows, shape, batch, packer)
        rows = replace(rows, query_start_loc=np.arange(0, (rows.slots.size + 1) * shape.width, shape.width))
    drafts, samples = None, last_samples(rows, sampled_rows)
    if features.drafts is not None and num_planned is not None:
        moves = token_moves(rows, num_planned, packer) if shape is None else None
        drafts, samples = features.drafts.lay_out_samples(rows, sampled_rows, num_planned, moves, packer)
    sampling = features.sampling.lay_out_samples(rows, samples, packer) if sampled_rows.size else None
    packed_edits = edits.pack(packer)
    inputs = StepInputs(
        arrays=packer.pack(),
        num_tokens=scheduler_output.total_num_scheduled_tokens,
        edits=packed_edits,
        request_ids=rows.request_ids,
        is_sampled=is_sampled.tolist(),
        rows=token_rows,
        sampling=sampling,
        is_constrained=bool(scheduler_output.grammar_rows),
        prompt_logprobs=prompt_logprobs,
        drafts=drafts,
        pooling=pooling,
        encoder_work=encoder_work(scheduler_output),
    )
    tables.num_computed_tokens[rows.slots] = rows.ends
    tables.num_tokens[rows.slots[sampled_rows]] += 1
    return inputs


def encoder_work(scheduler_output: SchedulerOutput) -> EncoderWork | None:
    """Return the images that the step encodes before its forward pass, and those whose encodings it frees."""
    if not scheduler_output.freed_images and not scheduler_output.encoder_inputs:
        return None
    return EncoderWork(scheduler_output.freed_images, scheduler_output.encoder_inputs)


def _graph_shape(
    rows: Rows, num_planned: IntArray | None, batch: InputBatch, graphs: DecodeGraphs | None
) -> GraphShape | None:
    """Return the shape of the graph for a step. None if not all rows are decodes, or if no shape for as many was
    captured."""
    counts, loras = rows.counts, batch.features.loras
    num_drafts = 0 if num_planned is None else num_planned.sum()
    if graphs is None or counts.size + num_drafts != counts.sum():
        return None
    has_loras = loras is not None and loras.are_used(rows)
    return graphs.shape_for(counts.size, int(counts.max()), has_loras=has_loras)


def _decode_rows(rows: Rows, shape: GraphShape, batch: InputBatch, packer: Packer) -> DecodeRows:
    columns = [columns for feature in batch.active if (columns := feature.lay_out_decodes(rows)) is not None]
    return DecodeRows(shape, packer.add(pad_rows(rows.slots, rows.ends, rows.counts, shape.num_rows, columns)))


def _token_rows(rows: Rows, batch: InputBatch, packer: Packer, graphs: PromptGraphs | None) -> TokenRows | PromptRows:
    features = [inputs for feature in batch.active if (inputs := feature.lay_out(rows, packer)) is not None]
    if graphs is not None and not features and (laid_out := graphs.lay_out(rows)) is not None:
        shape, values = laid_out
        return PromptRows(shape, packer.add(values))
    tables, counts, positions = batch.tables, rows.counts, rows.token_positions()
    token_slots = np.repeat(rows.slots, counts)
    return TokenRows(
        num_decodes=int(np.count_nonzero(counts == 1)),
        max_seq_len=int(rows.ends.max()),
        positions=packer.add(positions),
        token_positions=packer.add(token_slots * tables.token_width + positions),
        block_positions=packer.add(token_slots * tables.max_blocks + positions // tables.block_size),
        block_offsets=packer.add(positions % tables.block_size),
        slots=packer.add(rows.slots),
        query_start_loc=packer.add(rows.query_start_loc),
        seq_lens=packer.add(rows.ends),
        features=features,
    )


@dataclass(slots=True)
class _Decodes:
    """A step of decodes only. Until its batch changes, the next step's arrays are its arrays plus `increments`."""

    slots: IntArray
    request_ids: list[str]
    unchanged: dict[str, Any]  # fields of `StepInputs`: three times as fast as `dataclasses.replace`
    sampling: SamplingInputs
    values: IntArray  # of the arrays of `inputs`, without its edits
    increments: IntArray
    lengths: list[int]
    no_edits: PackedEdits


class InputBuilder:
    """Builds steps' inputs. Call `build` for every step, in order: the batch counts each step's tokens as computed."""

    def __init__(
        self, batch: InputBatch, graphs: DecodeGraphs | None, prompt_graphs: PromptGraphs | None = None
    ) -> None:
        self._batch = batch
        self._graphs = graphs
        self._prompt_graphs = prompt_graphs
        self._last: _Decodes | None = None

    def build(self, scheduler_output: SchedulerOutput) -> StepInputs | None:
        """Apply the scheduler's output to the batch's host side and lay out the step. None if it computes no tokens."""
        if self._last is not None and _continues(scheduler_output, self._last.request_ids):
            return self._build_next(scheduler_output, self._last)
        inputs = build_step_inputs(scheduler_output, self._batch, self._graphs, self._prompt_graphs)
        self._last = None if inputs is None or scheduler_output.states else self._decodes(inputs)
        return inputs

    def _build_next(self, scheduler_output: SchedulerOutput, last: _Decodes) -> StepInputs:
        changed = scheduler_output.cached_requests
        last.values = last.values + last.increments  # a new array: steps in flight keep theirs
        arrays, edits = PackedArrays(last.values, last.lengths), last.no_edits
        if changed:
            arrays, edits = self._append_edits(changed, arrays)
        if last.sampling.max_num_tokens:
            last.sampling = replace(last.sampling, max_num_tokens=last.sampling.max_num_tokens + 1)
        self._batch.tables.num_computed_tokens[last.slots] += 1
        self._batch.tables.num_tokens[last.slots] += 1
        return StepInputs(
            **last.unchanged,
            arrays=arrays,
            edits=edits,
            sampling=last.sampling,
            is_constrained=bool(scheduler_output.grammar_rows),
            encoder_work=encoder_work(scheduler_output),
        )

    def _append_edits(self, changed: list[CachedRequestData], arrays: PackedArrays) -> tuple[PackedArrays, PackedEdits]:
        edits, packer = Edits(), Packer(arrays)
        self._batch.update(changed, edits)
        packed = edits.pack(packer)
        return packer.pack(), packed

    def _decodes(self, inputs: StepInputs) -> _Decodes | None:
        """Return the step in the form that the next one may continue. None if more than positions will change."""
        rows, sampling = inputs.rows, inputs.sampling
        if not isinstance(rows, DecodeRows) or sampling is None or sampling.rules is not None or inputs.drafts:
            return None
        num_rows = len(inputs.request_ids)
        if sampling.num_rows < num_rows:
            return None
        first_edit = inputs.edits.first_array
        lengths = inputs.arrays.lengths[:first_edit]
        ends = np.cumsum(lengths)
        values = inputs.arrays.values[: ends[-1]]
        increments = np.zeros_like(values)
        first_end = ends[rows.rows] - lengths[rows.rows] + rows.shape.num_rows  # behind the slots
        increments[first_end : first_end + num_rows] = 1
        for index in (sampling.positions, sampling.write_to):
            increments[ends[index] - num_rows : ends[index]] = 1
        slots, no_edits = self._batch.slots_of(inputs.request_ids), PackedEdits(first_edit)
        unchanged = {each.name: getattr(inputs, each.name) for each in fields(inputs) if each.name not in _CHANGED}
        return _Decodes(slots, inputs.request_ids, unchanged, sampling, values, increments, lengths, no_edits)


def _continues(scheduler_output: SchedulerOutput, request_ids: list[str]) -> bool:
    """Whether the step computes one token of each of these requests and no request joins or leaves the batch."""
    return scheduler_output.decode_request_ids == request_ids and not (
        scheduler_output.num_chunk_tokens
        or scheduler_output.new_requests
        or scheduler_output.finished_request_ids
        or scheduler_output.preempted_request_ids
        or scheduler_output.states
    )
