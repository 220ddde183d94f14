"""InputBatch: the state of a worker's requests by slot, in memory that is allocated once and edited every step.

The host keeps what step inputs are built from, the device what steps read. Its token table holds prompts and sampled
tokens, so the next step, penalties and bad words read sampled tokens without the host. Here are the columns that all
requests have: tokens, lengths and blocks. Those of features are in classes of their own (`Columns`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proa.contract import PoolingTask
from proa_engine.core.types import CachedRequestData, NewRequestData
from proa_engine.models.image_config import ImageConfig
from proa_engine.models.pooling_config import PoolingKind
from proa_engine.worker.columns import Columns, Write
from proa_engine.worker.image_inputs import ImageColumns
from proa_engine.worker.logprob_inputs import LogprobColumns
from proa_engine.worker.lora_adapters import LoraAdapters, LoraColumns
from proa_engine.worker.pooling_inputs import PoolingColumns
from proa_engine.worker.sampling_inputs import SamplingColumns
from proa_engine.worker.staging import IntArray, Packer
from proa_engine.worker.state_inputs import StateColumns
from proa_engine.worker.token_rules import RuleColumns


@dataclass(frozen=True, slots=True)
class PackedEdits:
    """What a step writes to the device's tables before it reads them."""

    first_array: int  # staged index of the first; the step's arrays before it are not edits
    writes: Sequence[Write] = ()


class InputBatch:
    """Slots 0 … max_num_seqs - 1. The scheduler never runs more than `max_num_seqs` requests, so one is always free."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        device: torch.device,
        max_drafts: int = 0,
        num_tables: int = 1,
        has_states: bool = False,
        loras: LoraAdapters | None = None,
        pooling_kinds: Mapping[PoolingTask, PoolingKind] | None = None,
        image_config: ImageConfig | None = None,
    ) -> None:
        """`loras` None: requests must have no adapter. `image_config` None: they must have no images."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_drafts = max_drafts  # draft tokens that a request may have in a step, beside its last token
        self.token_width = max_model_len + 1
        self.max_blocks = -(-max_model_len // block_size)
        # Tokens in the table, including those still being sampled. With drafts this is a lower bound.
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.token_ids = torch.empty(max_num_seqs, self.token_width, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(num_tables, max_num_seqs, self.max_blocks, dtype=torch.int32, device=device)
        self.new_requests: list[tuple[int, int]] = []  # slot and tokens of those that were added since the last step
        self.sampling = SamplingColumns(max_num_seqs, vocab_size, device)
        self.logprobs = LogprobColumns(max_num_seqs)
        self.rules = RuleColumns(eos_token_ids)
        # Those of features that only some engines have.
        self.states = StateColumns(max_num_seqs) if has_states else None
        self.loras = LoraColumns(loras, max_num_seqs) if loras is not None else None
        self.pooling = PoolingColumns(pooling_kinds) if pooling_kinds else None
        self.images = ImageColumns(image_config, max_num_seqs, device) if image_config is not None else None
        features: tuple[Columns | None, ...] = (
            *(self.sampling, self.logprobs, self.rules),
            *(self.loras, self.pooling, self.images),
        )
        self._columns = [each for each in features if each is not None]
        self._num_blocks = [[0] * num_tables for _ in range(max_num_seqs)]
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(max_num_seqs))[::-1]
        self._token_edits: list[tuple[int, IntArray]] = []  # flat start in the token table, tokens
        self._block_positions: list[int] = []  # flat in the block tables
        self._block_ids: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def slots_of(self, request_ids: Collection[str]) -> IntArray:
        return np.fromiter(map(self._slots.__getitem__, request_ids), np.int64, len(request_ids))

    def add(self, request: NewRequestData) -> None:
        """Assign the request a slot and write all of the slot's state."""
        slot = self._free_slots.pop()
        self._slots[request.request_id] = slot
        # A pooled request has one token more that no step computes, so that none samples.
        self.num_tokens[slot] = len(request.token_ids) + (request.pooling_params is not None)
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed_tokens[slot] = request.num_computed_tokens
        self.new_requests.append((slot, len(request.token_ids)))
        self._token_edits.append((slot * self.token_width, np.array(request.token_ids, np.int64)))
        for columns in self._columns:
            columns.add(slot, request)
        self._num_blocks[slot] = [0] * len(self._num_blocks[slot])
        self._append_blocks(slot, request.block_ids)

    def update(self, requests: Sequence[CachedRequestData]) -> None:
        slots = self.slots_of([request.request_id for request in requests])
        self.num_computed_tokens[slots] = [request.num_computed_tokens for request in requests]
        for request in requests:
            if request.new_block_ids:
                self._append_blocks(self._slots[request.request_id], request.new_block_ids)
            if request.new_token_ids:
                self._write_tokens(self._slots[request.request_id], request)

    def remove(self, request_id: str) -> None:
        """Free the request's slot. Ids of requests that were never scheduled are ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            for columns in self._columns:
                columns.remove(slot)
            self._free_slots.append(slot)

    def pack_edits(self, packer: Packer) -> PackedEdits:
        """Pack what has to be written on the device since the last call."""
        first_array, writes = len(packer), []
        if self._token_edits:
            writes.append(self._pack_tokens(packer))
        if self._block_ids:
            writes.append(self._pack_blocks(packer))
        for columns in self._columns:
            if (write := columns.pack_edits(packer)) is not None:
                writes.append(write)
        self.new_requests.clear()
        return PackedEdits(first_array, writes)

    def _append_blocks(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Append to the slot's tables. -1, a block that the request does not hold, is stored as 0 and never read."""
        num_blocks = self._num_blocks[slot]
        for table, ids in enumerate(block_ids):
            start = (table * len(self._num_blocks) + slot) * self.max_blocks + num_blocks[table]
            self._block_positions += range(start, start + len(ids))
            self._block_ids += ids if table == 0 else [max(block_id, 0) for block_id in ids]
            num_blocks[table] += len(ids)

    def _write_tokens(self, slot: int, request: CachedRequestData) -> None:
        """Write tokens behind the computed ones, in place of one that a step in flight samples there."""
        start = slot * self.token_width + request.num_computed_tokens
        self._token_edits.append((start, np.array(request.new_token_ids, np.int64)))
        self.num_tokens[slot] = request.num_computed_tokens + len(request.new_token_ids)

    def _pack_tokens(self, packer: Packer) -> Write:
        """Each row of tokens stays separate: it is one long slice copy."""
        tokens = [(start, packer.add(row)) for start, row in self._token_edits]
        self._token_edits.clear()

        def write(arrays: Sequence[Tensor]) -> None:
            flat = self.token_ids.view(-1)
            for start, index in tokens:
                flat[start : start + arrays[index].numel()] = arrays[index]

        return write

    def _pack_blocks(self, packer: Packer) -> Write:
        positions = packer.add(np.array(self._block_positions, np.int64))
        ids = packer.add(np.array(self._block_ids, np.int64))
        self._block_positions.clear()
        self._block_ids.clear()

        def write(arrays: Sequence[Tensor]) -> None:
            self.block_tables.view(-1).index_copy_(0, arrays[positions], arrays[ids].int())

        return write
