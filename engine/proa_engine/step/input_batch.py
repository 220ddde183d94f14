"""InputBatch: a worker's requests by slot, with the columns of every feature, in memory that is allocated once."""

from collections.abc import Collection, Sequence

import numpy as np

from proa_engine.core.types import CachedRequestData, NewRequestData, SchedulerOutput
from proa_engine.step.columns import Columns, Rows
from proa_engine.step.sampling import SamplingColumns
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray


class InputBatch:
    """The requests in slots 0 … max_num_seqs - 1. The scheduler never runs more than `max_num_seqs` requests, so a slot
    is always free."""

    def __init__(self, tables: SlotTables, sampling: SamplingColumns, features: Sequence[Columns] = ()) -> None:
        """`features`: those of the engine. CUDA graphs have their columns in this order."""
        self.tables = tables
        self.sampling = sampling
        self.features = features
        self.used_features = [feature for feature in features if feature.is_used]
        self.has_drafts = any(feature.adds_drafts for feature in features)
        self._num_blocks = [[0] * tables.block_tables.shape[0] for _ in range(tables.num_slots)]
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(tables.num_slots))[::-1]

    def __len__(self) -> int:
        return len(self._slots)

    def slots_of(self, request_ids: Collection[str]) -> IntArray:
        return np.fromiter(map(self._slots.__getitem__, request_ids), np.int64, len(request_ids))

    def apply(self, scheduler_output: SchedulerOutput) -> Edits:
        """Remove finished and preempted requests and add new ones on the host. Returns the edits for the device."""
        edits, removed = Edits(), (*scheduler_output.finished_request_ids, *scheduler_output.preempted_request_ids)
        for request_id in removed:
            self._remove(request_id)
        for new in scheduler_output.new_requests:
            self._add(new, edits)
        if removed or scheduler_output.new_requests:
            self.used_features = [feature for feature in self.features if feature.is_used]
        self.update(scheduler_output.cached_requests, edits)
        return edits

    def update(self, requests: Sequence[CachedRequestData], edits: Edits) -> None:
        slots = self.slots_of([request.request_id for request in requests])
        self.tables.num_computed_tokens[slots] = [request.num_computed_tokens for request in requests]
        positions: list[int] = []
        block_ids: list[int] = []
        for request in requests:
            if request.new_block_ids:
                self._append_blocks(self._slots[request.request_id], request.new_block_ids, positions, block_ids)
            if request.new_token_ids:
                self._write_tokens(self._slots[request.request_id], request, edits)
        if positions:
            edits.write(self.tables.flat_block_tables, positions, block_ids)

    def rows(self, scheduler_output: SchedulerOutput) -> Rows:
        """Return a step's rows: its requests of one token, then the others, in the scheduler's order."""
        request_ids = [*scheduler_output.decode_request_ids, *scheduler_output.num_chunk_tokens]
        counts = np.ones(len(request_ids), np.int64)
        counts[len(scheduler_output.decode_request_ids) :] = list(scheduler_output.num_chunk_tokens.values())
        slots = self.slots_of(request_ids)
        starts, num_tokens = self.tables.num_computed_tokens[slots], self.tables.num_tokens[slots]
        ends = starts + counts
        assert self.has_drafts or (ends <= num_tokens).all(), "a step cannot compute tokens that do not exist"
        # Where a row begins with its request's last known token, the tokens behind are drafts.
        num_samples = np.where(starts + 1 >= num_tokens, counts, ends >= num_tokens)
        query_start_loc = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        return Rows(request_ids, slots, starts, ends, counts, num_samples, query_start_loc, scheduler_output.states)

    def _add(self, request: NewRequestData, edits: Edits) -> None:
        """Assign the request a slot and write all of the slot's state."""
        slot, tables = self._free_slots.pop(), self.tables
        self._slots[request.request_id] = slot
        tables.num_tokens[slot] = len(request.token_ids)
        tables.num_prompt_tokens[slot] = request.num_prompt_tokens
        tables.num_computed_tokens[slot] = request.num_computed_tokens
        edits.write_slice(tables.flat_token_ids, slot * tables.token_width, request.token_ids)
        self._num_blocks[slot] = [0] * len(self._num_blocks[slot])
        positions: list[int] = []
        block_ids: list[int] = []
        self._append_blocks(slot, request.block_ids, positions, block_ids)
        edits.write(tables.flat_block_tables, positions, block_ids)
        for feature in (self.sampling, *self.features):
            feature.add(request, slot, edits)

    def _remove(self, request_id: str) -> None:
        """Free the request's slot. Ids of requests that were never scheduled are ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            for feature in (self.sampling, *self.features):
                feature.remove(slot)
            self._free_slots.append(slot)

    def _append_blocks(
        self, slot: int, new: Sequence[Sequence[int]], positions: list[int], block_ids: list[int]
    ) -> None:
        """Append blocks to the slot's tables: add their flat positions and ids to the lists, which are written at once.

        -1 stands for a block that the request does not hold; it is stored as 0 and never read.
        """
        num_blocks, tables = self._num_blocks[slot], self.tables
        for table, ids in enumerate(new):
            start = (table * tables.block_tables.shape[1] + slot) * tables.max_blocks + num_blocks[table]
            positions += range(start, start + len(ids))
            block_ids += ids if table == 0 else [max(block_id, 0) for block_id in ids]
            num_blocks[table] += len(ids)

    def _write_tokens(self, slot: int, request: CachedRequestData, edits: Edits) -> None:
        """Write the request's new known tokens behind the computed ones, over tokens that a step in flight samples
        there."""
        start = slot * self.tables.token_width + request.num_computed_tokens
        edits.write_slice(self.tables.flat_token_ids, start, request.new_token_ids)
        num_tokens = request.num_computed_tokens + len(request.new_token_ids)
        self.tables.num_tokens[slot] = num_tokens
        for feature in self.features:
            feature.set_length(slot, num_tokens, edits)
