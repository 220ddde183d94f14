"""ModelRunner: turns a planned step into a forward pass and tokens on one device.

`prepare` is host work and may run while earlier steps compute; `forward` and `sample` are device work, called in the
order of the plans. Knows nothing of other ranks but what the model's parallel layers do, nor of threads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proa_engine.core.types import SchedulerOutput
from proa_engine.kernels.decode_inputs import decode_inputs
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.models.base import CausalLM
from proa_engine.worker.async_output import StepTensors
from proa_engine.worker.decode_graphs import DecodeGraphs, Recorder
from proa_engine.worker.drafter import Drafter
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.sampler import LogprobTensors, Sampler
from proa_engine.worker.staging import Staging
from proa_engine.worker.step_inputs import PackedEdits, StepInputs, TokenRows, build_step_inputs

# Logits of prompt tokens are made for so many bytes at a time.
_PROMPT_LOGITS_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A step between its forward pass and its sampling."""

    inputs: StepInputs
    arrays: list[Tensor]
    hidden: Tensor  # [tokens, hidden_size]


class ModelRunner:
    """With `graphs`, steps of decodes alone are replayed, once `capture_graphs` has recorded them.

    With a `drafter`, there if and only if the batch may have drafts, decodes check draft tokens; then without graphs.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[Tensor],
        batch: InputBatch,
        *,
        block_size: int,
        vocab_size: int,
        max_logprobs: int,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._batch = batch
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._prompt_slice = max(8, _PROMPT_LOGITS_BYTES // (4 * vocab_size))
        self._sampler = Sampler(batch, max_logprobs)
        self._staging = Staging(device)
        self._graphs = graphs
        self._drafter = drafter
        self._forwarded: _Forwarded | None = None

    def prepare(self, plan: SchedulerOutput) -> StepInputs | None:
        """Apply the plan to the host side of the batch; None where there is nothing to compute."""
        return build_step_inputs(plan, self._batch, self._block_size, self._vocab_size, self._graphs)

    @torch.inference_mode()
    def capture_graphs(self, recorder: Recorder) -> None:
        assert self._graphs is not None
        self._graphs.record(self._decode, recorder)

    def forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> None:
        """Run the model over the step's tokens and keep the hidden states for `sample`."""
        arrays = list(self._staging.ship(inputs.packer))
        self._apply(inputs.edits, arrays)
        if self._drafter is not None:
            self._drafter.place(inputs, arrays)
        rows = inputs.rows
        if isinstance(rows, TokenRows):
            hidden = self._run(rows, arrays)
        else:
            assert self._graphs is not None  # else there would be no such rows
            hidden = self._graphs.replay(rows.size, arrays[rows.slots_and_positions])[: len(inputs.request_ids)]
        self._forwarded = _Forwarded(inputs, arrays, hidden)

    @torch.inference_mode()
    def sample(self) -> StepTensors:
        """Sample the tokens of the step that `forward` ran last; they go into the token table for the next step."""
        assert self._forwarded is not None, "sample follows forward"
        inputs, arrays, hidden = self._forwarded.inputs, self._forwarded.arrays, self._forwarded.hidden
        self._forwarded = None
        prompt_logprobs = self._prompt_logprobs(inputs, arrays, hidden)
        sampling = inputs.sampling
        if sampling is None:
            return StepTensors(None, None, prompt_logprobs)
        rows = hidden if sampling.is_whole_batch else hidden.index_select(0, arrays[sampling.hidden_rows])
        sampled = self._sampler.sample(self._model.compute_logits(rows), sampling, arrays)
        self._batch.token_ids.view(-1).index_copy_(0, arrays[sampling.write_to], sampled.token_ids.int())
        drafts = None if self._drafter is None else self._drafter.accept(inputs, arrays, sampled.token_ids)
        return StepTensors(sampled.token_ids, sampled.logprobs, prompt_logprobs, drafts)

    def _run(self, rows: TokenRows, arrays: list[Tensor]) -> Tensor:
        batch = self._batch
        input_ids = batch.token_ids.view(-1).index_select(0, arrays[rows.token_positions]).long()
        blocks = batch.block_table.view(-1).index_select(0, arrays[rows.block_positions]).long()
        num_blocks = -(-rows.max_seq_len // self._block_size)
        metadata = AttentionMetadata(
            query_start_loc=arrays[rows.query_start_loc].int(),
            seq_lens=arrays[rows.seq_lens].int(),
            block_table=batch.block_table[:, :num_blocks].index_select(0, arrays[rows.slots]),
            slot_mapping=blocks * self._block_size + arrays[rows.block_offsets],
            num_decodes=rows.num_decodes,
        )
        return self._model(input_ids, arrays[rows.positions], self._kv_caches, metadata)

    def _decode(self, rows: Tensor) -> Tensor:
        """The same for decodes alone, from their slots and positions, [2, rows] int64, and fixed memory."""
        batch, num_rows = self._batch, rows.shape[1]
        inputs = decode_inputs(rows, batch.token_ids, batch.block_table, self._block_size)
        metadata = AttentionMetadata(
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device),
            seq_lens=inputs.seq_lens,
            block_table=inputs.block_table,
            slot_mapping=inputs.slot_mapping,
            num_decodes=num_rows,
        )
        return self._model(inputs.input_ids, inputs.positions, self._kv_caches, metadata)

    def _apply(self, edits: PackedEdits, arrays: list[Tensor]) -> None:
        """Bring the device's tables up to this step."""
        flat = self._batch.token_ids.view(-1)
        for start, place in edits.tokens:
            flat[start : start + arrays[place].numel()] = arrays[place]
        if edits.blocks is not None:
            positions, ids = edits.blocks
            self._batch.block_table.view(-1).index_copy_(0, arrays[positions], arrays[ids].int())
        if edits.params is not None:
            slots, rows = edits.params
            values = arrays[rows].view(torch.float64).view(-1, self._batch.params.shape[1])
            self._batch.params.index_copy_(0, arrays[slots], values)

    def _prompt_logprobs(self, inputs: StepInputs, arrays: list[Tensor], hidden: Tensor) -> list[LogprobTensors]:
        """Log probabilities of prompt tokens, in slices: the logits of a long prompt would not fit into memory."""
        wanted = inputs.prompt_logprobs
        if wanted is None:
            return []
        targets = self._batch.token_ids.view(-1)[arrays[wanted.targets]].long()
        slices = zip(
            arrays[wanted.hidden_rows].split(self._prompt_slice), targets.split(self._prompt_slice), strict=True
        )
        return [
            self._sampler.token_logprobs(self._model.compute_logits(hidden.index_select(0, rows)), ids)
            for rows, ids in slices
        ]
