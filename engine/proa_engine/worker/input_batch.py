"""InputBatch: the requests that a worker knows, by slot, in memory that is allocated once and edited.

The host keeps what it decides by (lengths, which sampling features a slot uses); the device keeps what steps read
(tokens, block table, sampling parameters). The device's token table holds every token, prompt and sampled, so a
sampled token feeds the next step, and penalties and bad words read it, without the host. The host side changes when a
step is planned; the same changes reach the device in stream order with that step, so steps in flight never see them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from proa_engine.core.types import CachedRequestData, NewRequestData
from proa_engine.kernels import sampling_params as columns
from proa_engine.worker.staging import IntArray
from proa_engine.worker.token_rules import TokenRules


@dataclass(slots=True)
class BatchEdits:
    """What a step changes in the device's tables before it reads them."""

    token_starts: list[int] = field(default_factory=list)  # flat positions in the token table
    token_rows: list[IntArray] = field(default_factory=list)
    block_positions: list[IntArray] = field(default_factory=list)  # flat positions in the block table
    block_ids: list[IntArray] = field(default_factory=list)
    param_slots: list[int] = field(default_factory=list)
    param_rows: list[list[float]] = field(default_factory=list)


class InputBatch:
    """Slots 0 … max_num_seqs - 1; whoever asks for one when none is free broke the scheduler's promise."""

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
    ) -> None:
        self.max_drafts = max_drafts  # draft tokens that a row may have beside its last token
        self.token_width = max_model_len + 1
        self.max_blocks = -(-max_model_len // block_size)
        # Tokens in the table, those still being sampled included. Where there are drafts, at least so many.
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.is_random = np.zeros(max_num_seqs, bool)
        self.has_top_k_top_p = np.zeros(max_num_seqs, bool)  # top-k or top-p
        self.has_min_p = np.zeros(max_num_seqs, bool)
        self.has_penalties = np.zeros(max_num_seqs, bool)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)  # -1: none wanted
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.rules: dict[int, TokenRules] = {}  # by slot, only those that have some
        self.token_ids = torch.empty(max_num_seqs, self.token_width, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(max_num_seqs, self.max_blocks, dtype=torch.int32, device=device)
        self.params = torch.zeros(max_num_seqs, columns.NUM_COLUMNS, dtype=torch.float64, device=device)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(max_num_seqs))[::-1]

    def __len__(self) -> int:
        return len(self._slots)

    def slots_of(self, request_ids: Collection[str]) -> IntArray:
        return np.fromiter(map(self._slots.__getitem__, request_ids), np.int64, len(request_ids))

    def add(self, request: NewRequestData, edits: BatchEdits) -> None:
        """Give the request a slot and write all of the slot's state."""
        slot = self._free_slots.pop()
        self._slots[request.request_id] = slot
        params = request.sampling_params
        self.num_tokens[slot] = len(request.token_ids)
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed_tokens[slot] = request.num_computed_tokens
        self.is_random[slot] = params.temperature >= columns.MIN_TEMPERATURE
        self.has_top_k_top_p[slot] = 0 < params.top_k < self._vocab_size or params.top_p < 1
        self.has_min_p[slot] = params.min_p > 0
        self.has_penalties[slot] = (
            params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        rules = TokenRules.of(params, self._eos_token_ids)
        if rules is not None:
            self.rules[slot] = rules
        edits.token_starts.append(slot * self.token_width)
        edits.token_rows.append(np.array(request.token_ids, np.int64))
        edits.param_slots.append(slot)
        edits.param_rows.append(self._param_row(request))
        self._num_blocks[slot] = 0
        self._append_blocks(slot, request.block_ids, edits)

    def update(self, requests: Sequence[CachedRequestData], edits: BatchEdits) -> None:
        slots = self.slots_of([request.request_id for request in requests])
        self.num_computed_tokens[slots] = [request.num_computed_tokens for request in requests]
        for request in requests:
            if request.new_block_ids:
                self._append_blocks(self._slots[request.request_id], request.new_block_ids, edits)

    def remove(self, request_id: str) -> None:
        """Take the slot back. A request that was never planned is not known here, and that is fine."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self.rules.pop(slot, None)
            self._free_slots.append(slot)

    def _append_blocks(self, slot: int, block_ids: list[int], edits: BatchEdits) -> None:
        start = slot * self.max_blocks + int(self._num_blocks[slot])
        edits.block_positions.append(np.arange(start, start + len(block_ids)))
        edits.block_ids.append(np.array(block_ids, np.int64))
        self._num_blocks[slot] += len(block_ids)

    def _param_row(self, request: NewRequestData) -> list[float]:
        params = request.sampling_params
        key = params.key or 0
        row = [0.0] * columns.NUM_COLUMNS
        row[columns.TEMPERATURE] = params.temperature
        row[columns.TOP_P] = params.top_p
        row[columns.MIN_P] = params.min_p
        row[columns.REPETITION] = params.repetition_penalty
        row[columns.FREQUENCY] = params.frequency_penalty
        row[columns.PRESENCE] = params.presence_penalty
        row[columns.TOP_K] = min(params.top_k, self._vocab_size) or self._vocab_size
        row[columns.KEY_LO] = key & 0xFFFFFFFF
        row[columns.KEY_HI] = key >> 32
        row[columns.NUM_PROMPT] = request.num_prompt_tokens
        return row
