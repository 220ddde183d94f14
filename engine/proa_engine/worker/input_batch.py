"""InputBatch: the state of a worker's requests by slot, in memory that is allocated once and edited every step.

The host keeps what step inputs are built from: lengths, and which sampling operations a slot needs. The device keeps
what steps read: tokens, block table, sampling parameters. Its token table holds prompts and sampled tokens, so the next
step, penalties and bad words read sampled tokens without the host. The host side changes when a step's inputs are
built; the device side changes with that step, in stream order, so steps in flight do not see later edits.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proa.contract import PoolingParams, PoolingTask
from proa_engine.core.types import NO_LORA, CachedRequestData, NewRequestData
from proa_engine.kernels import sampling_params as columns
from proa_engine.models.image_config import ImageConfig
from proa_engine.models.pooling_config import PoolingKind
from proa_engine.worker.image_inputs import RequestImages, three_positions
from proa_engine.worker.lora_adapters import LoraAdapters, LoraFill
from proa_engine.worker.staging import IntArray, Packer
from proa_engine.worker.token_rules import TokenRules


@dataclass(frozen=True, slots=True)
class PackedEdits:
    """BatchEdits as staged indices. Token rows stay separate: each is one long slice copy."""

    first_array: int  # staged index of the first; the step's arrays before it are not edits
    tokens: list[tuple[int, int]]  # flat start in the token table, staged index
    blocks: tuple[int, int] | None  # flat positions, ids
    params: tuple[int, int] | None  # slots, rows
    position_deltas: int | None = None  # of the slots of `params`
    loras: Sequence[LoraFill] = ()


@dataclass(slots=True)
class BatchEdits:
    """What a step writes to the device's tables before it reads them."""

    token_starts: list[int] = field(default_factory=list)  # flat positions in the token table
    token_rows: list[IntArray] = field(default_factory=list)
    block_positions: list[int] = field(default_factory=list)  # flat positions in the block tables
    block_ids: list[int] = field(default_factory=list)
    param_slots: list[int] = field(default_factory=list)
    param_rows: list[list[float]] = field(default_factory=list)
    position_deltas: list[int] = field(default_factory=list)  # of `param_slots`; empty: the model has none
    loras: list[LoraFill] = field(default_factory=list)

    def pack(self, packer: Packer) -> PackedEdits:
        first_array, blocks, params, deltas = len(packer), None, None, None
        if self.block_ids:
            blocks = (
                packer.add(np.array(self.block_positions, np.int64)),
                packer.add(np.array(self.block_ids, np.int64)),
            )
        if self.param_slots:
            params = packer.add(np.array(self.param_slots, np.int64)), packer.add_floats(np.array(self.param_rows))
        if self.position_deltas:
            deltas = packer.add(np.array(self.position_deltas, np.int64))
        tokens = [(start, packer.add(row)) for start, row in zip(self.token_starts, self.token_rows, strict=True)]
        return PackedEdits(first_array, tokens, blocks, params, deltas, self.loras)


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
        self.is_random = np.zeros(max_num_seqs, bool)
        # By sampling operation: the slots that need it.
        self.needs: list[npt.NDArray[np.bool_]] = [np.zeros(max_num_seqs, bool) for _ in columns.Operation]
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)  # -1: not requested
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.logprob_token_ids: dict[int, tuple[int, ...]] = {}  # by slot; only slots that have any
        self.rules: dict[int, TokenRules] = {}  # by slot; only slots that have rules
        self.pooling: dict[int, PoolingParams] = {}  # by slot; only those of pooled requests
        self.pooling_kinds = pooling_kinds or {}
        self.token_ids = torch.empty(max_num_seqs, self.token_width, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(num_tables, max_num_seqs, self.max_blocks, dtype=torch.int32, device=device)
        self.params = torch.zeros(max_num_seqs, columns.NUM_COLUMNS, dtype=torch.float64, device=device)
        self.has_states = has_states  # of recurrent layers
        self.state_slots = np.zeros(max_num_seqs, np.int64)  # where each request's state is
        self.loras = loras
        self.lora_slots = np.full(max_num_seqs, NO_LORA, np.int64)  # of each request's adapter
        self.images: dict[int, RequestImages] = {}  # by slot; only those of requests with images
        self.image_ends = np.zeros(max_num_seqs, np.int64)  # prompt tokens up to the last image's end
        self.image_config = image_config
        # [slots] int64, for models with three positions: what is added to the places of tokens behind all images.
        self.position_deltas: Tensor | None = None
        if image_config is not None and image_config.has_three_positions:
            self.position_deltas = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._num_blocks = [[0] * num_tables for _ in range(max_num_seqs)]
        self._eos_token_ids = eos_token_ids
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(max_num_seqs))[::-1]

    def __len__(self) -> int:
        return len(self._slots)

    def slots_of(self, request_ids: Collection[str]) -> IntArray:
        return np.fromiter(map(self._slots.__getitem__, request_ids), np.int64, len(request_ids))

    def add(self, request: NewRequestData, edits: BatchEdits) -> None:
        """Assign the request a slot and write all of the slot's state."""
        slot = self._free_slots.pop()
        self._slots[request.request_id] = slot
        params = request.sampling_params
        self.num_tokens[slot] = len(request.token_ids)
        if request.pooling_params is not None:
            self.pooling[slot] = request.pooling_params
            self.num_tokens[slot] += 1  # that no step computes, so that none samples
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed_tokens[slot] = request.num_computed_tokens
        self.is_random[slot] = params.temperature >= columns.MIN_TEMPERATURE
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        if params.logprob_token_ids:
            self.logprob_token_ids[slot] = params.logprob_token_ids
        rules = TokenRules.of(params, self._eos_token_ids)
        if rules is not None:
            self.rules[slot] = rules
        edits.token_starts.append(slot * self.token_width)
        edits.token_rows.append(np.array(request.token_ids, np.int64))
        edits.param_slots.append(slot)
        edits.param_rows.append(self._add_params(request, slot))
        self.lora_slots[slot] = NO_LORA if request.lora is None else request.lora.slot
        if request.lora is not None:
            assert self.loras is not None, "the engine rejects adapters unless enable_lora is set"
            edits.loras += self.loras.assign(request.lora)
        self._add_images(request, slot, edits)
        self._num_blocks[slot] = [0] * len(self._num_blocks[slot])
        self._append_blocks(slot, request.block_ids, edits)

    def update(self, requests: Sequence[CachedRequestData], edits: BatchEdits) -> None:
        slots = self.slots_of([request.request_id for request in requests])
        self.num_computed_tokens[slots] = [request.num_computed_tokens for request in requests]
        for request in requests:
            if request.new_block_ids:
                self._append_blocks(self._slots[request.request_id], request.new_block_ids, edits)
            if request.new_token_ids:
                self._write_tokens(self._slots[request.request_id], request, edits)

    def remove(self, request_id: str) -> None:
        """Free the request's slot. Ids of requests that were never scheduled are ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self.logprob_token_ids.pop(slot, None)
            self.rules.pop(slot, None)
            self.pooling.pop(slot, None)
            self.images.pop(slot, None)
            self._free_slots.append(slot)

    def apply(self, edits: PackedEdits, arrays: Sequence[Tensor]) -> None:
        """Write a step's edits to the device's tables. `arrays` are the step's staged arrays."""
        for fill in edits.loras:
            fill()
        flat = self.token_ids.view(-1)
        for start, index in edits.tokens:
            flat[start : start + arrays[index].numel()] = arrays[index]
        if edits.blocks is not None:
            positions, ids = edits.blocks
            self.block_tables.view(-1).index_copy_(0, arrays[positions], arrays[ids].int())
        if edits.params is not None:
            slots, rows = edits.params
            self.params.index_copy_(0, arrays[slots], arrays[rows].view(torch.float64).view(-1, columns.NUM_COLUMNS))
            if edits.position_deltas is not None:
                assert self.position_deltas is not None
                self.position_deltas.index_copy_(0, arrays[slots], arrays[edits.position_deltas])

    def _add_images(self, request: NewRequestData, slot: int, edits: BatchEdits) -> None:
        self.image_ends[slot] = 0
        images: RequestImages | None = None
        if request.images:
            config = self.image_config
            assert config is not None, "the engine rejects images that its model cannot read"
            positions = three_positions(request.images, config.input.unit) if config.has_three_positions else None
            images = self.images[slot] = RequestImages(request.images, positions)
            self.image_ends[slot] = images.end
        if self.position_deltas is not None:
            edits.position_deltas.append(0 if images is None else images.delta)

    def _append_blocks(self, slot: int, block_ids: Sequence[Sequence[int]], edits: BatchEdits) -> None:
        """Append to the slot's tables. -1, a block that the request does not hold, is stored as 0 and never read."""
        num_blocks = self._num_blocks[slot]
        for table, ids in enumerate(block_ids):
            start = (table * len(self._num_blocks) + slot) * self.max_blocks + num_blocks[table]
            edits.block_positions += range(start, start + len(ids))
            edits.block_ids += ids if table == 0 else [max(block_id, 0) for block_id in ids]
            num_blocks[table] += len(ids)

    def _write_tokens(self, slot: int, request: CachedRequestData, edits: BatchEdits) -> None:
        """Write tokens behind the computed ones, in place of one that a step in flight samples there."""
        edits.token_starts.append(slot * self.token_width + request.num_computed_tokens)
        edits.token_rows.append(np.array(request.new_token_ids, np.int64))
        self.num_tokens[slot] = request.num_computed_tokens + len(request.new_token_ids)

    def _add_params(self, request: NewRequestData, slot: int) -> list[float]:
        """The request's row of the parameter table, [NUM_COLUMNS]; also notes which operations its slot needs."""
        params = request.sampling_params
        key = params.key or 0
        row = [0.0] * columns.NUM_COLUMNS
        row[columns.TEMPERATURE] = params.temperature
        row[columns.KEY_LO] = key & 0xFFFFFFFF
        row[columns.KEY_HI] = key >> 32
        row[columns.NUM_PROMPT] = request.num_prompt_tokens
        for needs in self.needs:
            needs[slot] = False
        for name, column, neutral, _, operation in columns.PARAMETERS:
            value = getattr(params, name)
            if neutral is None:
                neutral = self.vocab_size
                value = min(value, neutral) or neutral
            row[column] = value
            if value != neutral:
                self.needs[operation][slot] = True
        return row
