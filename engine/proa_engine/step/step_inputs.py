"""InputBuilder: turns each SchedulerOutput into a step's inputs. Host work: numpy over all rows at once. The arrays are
copied to the device together.

If a step decodes the same requests as the one before, its inputs are those of that step with increased positions.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from proa_engine.core.types import CachedRequestData, SchedulerOutput
from proa_engine.step.columns import Rows, StepLayout, StepPart, TokenRows
from proa_engine.step.decode_graphs import DecodeGraphs, GraphShape, pad_rows
from proa_engine.step.input_batch import InputBatch
from proa_engine.step.prompt_graphs import PromptGraphs, PromptShape
from proa_engine.step.sampling import SamplingInputs
from proa_engine.step.slots import Edits, PackedEdits
from proa_engine.step.staging import IntArray, PackedArrays, Packer

# Fields of `StepInputs` that differ between a step and one that continues it.
_CHANGED = {"arrays", "edits", "sampling", "is_constrained"}


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
    is_small: bool  # whether the step, on a CPU, is too small to be worth waking another thread
    edits: PackedEdits
    request_ids: list[str]
    num_samples: list[int]  # by row
    rows: TokenRows | DecodeRows | PromptRows
    sampling: SamplingInputs | None  # None: no row samples
    is_constrained: bool  # whether a row samples under a grammar
    parts: list[StepPart]  # what features do before the forward pass and after the sampling

    @property
    def draw_shape(self) -> GraphShape | None:
        """The shape whose graph samples the step's tokens, one for each row; None if the sampler does."""
        if not isinstance(self.rows, DecodeRows) or self.parts or self.is_constrained:
            return None
        return self.rows.shape if self.sampling is not None and self.sampling.is_plain else None


def _graph_shape(rows: Rows, batch: InputBatch, graphs: DecodeGraphs) -> GraphShape | None:
    """Return the shape of the graph for a step. None if not all rows are decodes, if no shape for as many was captured,
    or if a feature's rows have no graph."""
    if (rows.counts > np.maximum(rows.num_samples, 1)).any():
        return None
    shape = graphs.shape_for(rows.counts.size, int(rows.counts.max()))
    for feature in batch.used_features:
        if shape is not None:
            shape = feature.graph_shape(rows, shape)
    return shape


def _decode_rows(rows: Rows, shape: GraphShape, batch: InputBatch, packer: Packer) -> DecodeRows:
    columns = [columns for feature in batch.used_features if (columns := feature.lay_out_decodes(rows)) is not None]
    return DecodeRows(shape, packer.add(pad_rows(rows.slots, rows.ends, rows.counts, shape.num_rows, columns)))


def _token_rows(rows: Rows, batch: InputBatch, packer: Packer, graphs: PromptGraphs) -> TokenRows | PromptRows:
    features = [inputs for feature in batch.used_features if (inputs := feature.lay_out(rows, packer)) is not None]
    if graphs.are_captured and not features and (laid_out := graphs.lay_out(rows)) is not None:
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
    """Builds steps' inputs. Call `build` for every step, in order: the batch counts each step's tokens as computed and
    its samples as tokens. `max_small_tokens` is the most that a small step computes."""

    def __init__(
        self, batch: InputBatch, graphs: DecodeGraphs, prompt_graphs: PromptGraphs, max_small_tokens: int = 0
    ) -> None:
        self._batch = batch
        self._graphs = graphs
        self._prompt_graphs = prompt_graphs
        self._max_small_tokens = max_small_tokens
        self._last: _Decodes | None = None

    def build(self, scheduler_output: SchedulerOutput) -> StepInputs | None:
        """Apply the scheduler's output to the batch's host side and lay out the step. None if it computes no tokens."""
        if self._last is not None and _continues(scheduler_output, self._last.request_ids):
            return self._build_next(scheduler_output, self._last)
        self._last = None
        edits = self._batch.apply(scheduler_output)
        if scheduler_output.is_empty:
            return None
        inputs = self._build_anew(scheduler_output, edits)
        if isinstance(inputs.rows, DecodeRows) and not scheduler_output.states:
            self._last = self._decodes(inputs, inputs.rows)
        return inputs

    def _build_anew(self, scheduler_output: SchedulerOutput, edits: Edits) -> StepInputs:
        """Lay out a step of any rows, `edits` included."""
        batch, packer = self._batch, Packer()
        rows = batch.rows(scheduler_output)
        shape = _graph_shape(rows, batch, self._graphs) if self._graphs.are_captured else None
        token_rows: TokenRows | DecodeRows | PromptRows
        if shape is None:
            token_rows = _token_rows(rows, batch, packer, self._prompt_graphs)
        else:
            token_rows = _decode_rows(rows, shape, batch, packer)
            rows = replace(rows, query_start_loc=np.arange(0, (rows.slots.size + 1) * shape.width, shape.width))
        sampling = batch.sampling.lay_out_samples(rows, packer)
        layout = StepLayout(scheduler_output, rows, token_rows if isinstance(token_rows, TokenRows) else None, sampling)
        parts = [part for each in batch.used_features if (part := each.lay_out_part(layout, packer)) is not None]
        packed_edits, num_tokens = edits.pack(packer), int(rows.counts.sum())
        inputs = StepInputs(
            arrays=packer.pack(),
            num_tokens=num_tokens,
            is_small=num_tokens <= self._max_small_tokens and not any(part.is_large for part in parts),
            edits=packed_edits,
            request_ids=rows.request_ids,
            num_samples=rows.num_samples.tolist(),
            rows=token_rows,
            sampling=sampling,
            is_constrained=bool(scheduler_output.grammar_rows),
            parts=parts,
        )
        batch.tables.num_computed_tokens[rows.slots] = rows.ends
        batch.tables.num_tokens[rows.slots] += rows.num_samples > 0
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
        )

    def _append_edits(self, changed: list[CachedRequestData], arrays: PackedArrays) -> tuple[PackedArrays, PackedEdits]:
        edits, packer = Edits(), Packer(arrays)
        self._batch.update(changed, edits)
        packed = edits.pack(packer)
        return packer.pack(), packed

    def _decodes(self, inputs: StepInputs, rows: DecodeRows) -> _Decodes | None:
        """Return the step in the form that the next one may continue. None if more than positions will change."""
        sampling, num_rows = inputs.sampling, len(inputs.request_ids)
        if sampling is None or sampling.rules is not None or sampling.num_rows < num_rows or inputs.parts:
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
        or scheduler_output.freed_media
        or scheduler_output.encoder_inputs
    )
