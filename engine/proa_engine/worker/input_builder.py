"""InputBuilder: builds each step's inputs. If a step decodes the same requests as the one before, its inputs are those
of that step with the positions counted on.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from proa_engine.core.types import CachedRequestData, SchedulerOutput
from proa_engine.worker.decode_graphs import DecodeGraphs
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.sampling import SamplingInputs
from proa_engine.worker.slots import Edits, PackedEdits
from proa_engine.worker.staging import IntArray, PackedArrays, Packer
from proa_engine.worker.step_inputs import DecodeRows, StepInputs, build_step_inputs, encoder_work

_CHANGED = {"arrays", "edits", "sampling", "is_constrained", "encoder_work"}  # fields that each step has its own of


@dataclass(slots=True)
class _Decodes:
    """A step of decodes only. Until its batch changes, the next step's arrays are its arrays plus `increments`."""

    slots: IntArray
    request_ids: list[str]
    unchanged: dict[str, Any]  # fields of `StepInputs`, in a third of the time of `dataclasses.replace`
    sampling: SamplingInputs
    values: IntArray  # of the arrays of `inputs`, without its edits
    increments: IntArray
    lengths: list[int]
    no_edits: PackedEdits


class InputBuilder:
    """Call `build` for every step, in order: the batch counts the tokens of each as computed."""

    def __init__(self, batch: InputBatch, graphs: DecodeGraphs | None) -> None:
        self._batch = batch
        self._graphs = graphs
        self._last: _Decodes | None = None

    def build(self, scheduler_output: SchedulerOutput) -> StepInputs | None:
        """Apply the scheduler's output to the batch's host side and lay out the step; None if it computes no tokens."""
        if self._last is not None and _continues(scheduler_output, self._last.request_ids):
            return self._build_next(scheduler_output, self._last)
        inputs = build_step_inputs(scheduler_output, self._batch, self._graphs)
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
        """The step as one that may be continued. None if more than positions will change."""
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
    """Whether the step computes one token of each of these requests and nothing joins or leaves the batch."""
    return scheduler_output.decode_request_ids == request_ids and not (
        scheduler_output.num_chunk_tokens
        or scheduler_output.new_requests
        or scheduler_output.finished_request_ids
        or scheduler_output.preempted_request_ids
        or scheduler_output.states
    )
