"""ModelRunner: turns a SchedulerOutput into a forward pass and sampled tokens on one device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.types import SchedulerOutput
from proa_engine.kernels.decode_inputs import decode_inputs
from proa_engine.kernels.state_rows import StateRows
from proa_engine.layers.attention_metadata import AttentionMetadata, ImageRows, table_rows
from proa_engine.layers.cache_layers import LayerCache
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.base import CausalLM
from proa_engine.worker.async_output import StepTensors
from proa_engine.worker.decode_graphs import DecodeGraphs, GraphCapture, GraphShape
from proa_engine.worker.drafter import Drafter
from proa_engine.worker.image_encodings import ImageEncodings
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.input_builder import InputBuilder
from proa_engine.worker.pooler import Pooler
from proa_engine.worker.sampler import LogprobTensors, SampledTokens, Sampler
from proa_engine.worker.small_steps import SmallSteps
from proa_engine.worker.staging import Staging
from proa_engine.worker.step_inputs import SamplingInputs, StepInputs, TokenRows
from proa_engine.worker.token_masks import ship_masks
from proa_engine.worker_spans import WorkerTracer

# Logits of prompt tokens are computed in slices of this many bytes: those of a long prompt do not fit into memory.
_PROMPT_LOGITS_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _ForwardResult:
    """A step between its forward pass and its sampling."""

    inputs: StepInputs
    arrays: list[Tensor]
    hidden: Tensor  # [tokens, hidden_size]


class ModelRunner:
    """For each step call `prepare_inputs`, `execute_model` and `sample_tokens`.

    `prepare_inputs` is host work and may run while earlier steps compute. The other two are device work, in the order
    of the steps. `graphs` replay steps of decodes only, once captured. A `drafter` is needed if and only if the batch
    may have draft tokens, a `pooler` if it may have pooled requests, `encodings` if it may have images.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: list[LayerCache],
        batch: InputBatch,
        *,
        max_logprobs: int,
        parallel: ParallelContext | None = None,
        graphs: DecodeGraphs | None = None,
        drafter: Drafter | None = None,
        small_steps: SmallSteps | None = None,
        pooler: Pooler | None = None,
        encodings: ImageEncodings | None = None,
        tracer: WorkerTracer | None = None,
    ) -> None:
        self.device = batch.token_ids.device
        self.caches = caches
        self._model = model
        self._batch = batch
        self._prompt_slice = max(8, _PROMPT_LOGITS_BYTES // (4 * batch.vocab_size))
        self._parallel = parallel or ParallelContext()
        self._sampler = Sampler(batch, max_logprobs)
        self._input_builder = InputBuilder(batch, graphs)
        self._staging = Staging(self.device)
        self._graphs = graphs
        self._drafter = drafter
        self._pooler = pooler
        self._encodings = encodings
        self._small_steps = small_steps or SmallSteps(0)
        self._tracer = tracer
        self._forward_result: _ForwardResult | None = None

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> StepInputs | None:
        """Update the host side of the batch and lay out the step; None if it computes no tokens."""
        if self._tracer is not None:
            self._tracer.update(scheduler_output)
        return self._input_builder.build(scheduler_output)

    def is_small(self, inputs: StepInputs) -> bool:
        """Whether the step, on a CPU, is too small to be worth waking another thread."""
        return inputs.encoder_work is None and self._small_steps.include(inputs.num_tokens)

    @torch.inference_mode()
    def execute_model(self, inputs: StepInputs) -> None:
        """Run the model over the step's tokens and keep the hidden states for `sample_tokens`."""
        if inputs.encoder_work is not None:
            assert self._encodings is not None, "the model reads no images"
            self._encodings.update(inputs.encoder_work)
        with self._small_steps.one_thread(inputs.num_tokens):
            arrays = list(self._staging.ship(inputs.arrays))
            for write in inputs.edits.writes:
                write(arrays)
            if self._drafter is not None:
                self._drafter.begin(inputs, arrays)
            rows = inputs.rows
            if isinstance(rows, TokenRows):
                hidden = self._forward(rows, arrays)
            else:
                assert self._graphs is not None, "only captured graphs have DecodeRows"
                hidden = self._graphs.replay(rows.shape, arrays[rows.rows])
                hidden = hidden[: len(inputs.request_ids) * rows.shape.width]
        self._forward_result = _ForwardResult(inputs, arrays, hidden)

    @torch.inference_mode()
    def sample_tokens(self, masks: GrammarMasks | None = None) -> StepTensors:
        """Sample the tokens of the last executed step and write them to the token table for the next one; pool the
        hidden states of pooled requests.

        A rank other than 0 gets no masks and returns no log probabilities of a constrained step's samples.
        """
        assert self._forward_result is not None, "call execute_model first"
        result, self._forward_result = self._forward_result, None
        with self._small_steps.one_thread(result.inputs.num_tokens):
            return self._sample_step(result.inputs, result.arrays, result.hidden, masks)

    @torch.inference_mode()
    def capture_graphs(self, capture: GraphCapture) -> None:
        assert self._graphs is not None
        self._graphs.capture(self._decode, capture)

    def release(self) -> None:
        """Free the KV cache and delete the graphs. The runner can run no more steps."""
        self.clear_graphs()
        self.caches.clear()

    def clear_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _sample_step(
        self, inputs: StepInputs, arrays: list[Tensor], hidden: Tensor, masks: GrammarMasks | None
    ) -> StepTensors:
        prompt_logprobs = self._prompt_logprobs(inputs, arrays, hidden)
        pooled = self._pool(inputs, arrays, hidden)
        sampling = inputs.sampling
        if sampling is None:
            return StepTensors(None, None, prompt_logprobs, pooled=pooled)
        rows = hidden if sampling.hidden_rows is None else hidden.index_select(0, arrays[sampling.hidden_rows])
        sampled = self._sample(self._model.compute_logits(rows), inputs, sampling, arrays, masks)
        self._batch.token_ids.view(-1).index_copy_(0, arrays[sampling.write_to], sampled.token_ids.int())
        drafts = None if self._drafter is None else self._drafter.accept(inputs, arrays, sampled.token_ids)
        return StepTensors(sampled.token_ids, sampled.logprobs, prompt_logprobs, drafts, pooled)

    def _pool(self, inputs: StepInputs, arrays: list[Tensor], hidden: Tensor) -> list[Tensor]:
        if inputs.pooling is None:
            return []
        assert self._pooler is not None, "the model has no pooling tasks"
        return self._pooler.pool(inputs.pooling, arrays, hidden)

    def _sample(
        self,
        logits: Tensor,
        inputs: StepInputs,
        sampling: SamplingInputs,
        arrays: list[Tensor],
        masks: GrammarMasks | None,
    ) -> SampledTokens:
        """Rank 0 has the masks, so it alone samples a constrained step."""
        if inputs.is_constrained and self._parallel.rank:
            token_ids = torch.empty(sampling.num_rows, dtype=torch.int64, device=self.device)
            return SampledTokens(self._parallel.broadcast(token_ids), None)
        on_device = None if masks is None else ship_masks(masks, sampling, self._staging)
        sampled = self._sampler.sample(logits, sampling, arrays, on_device)
        if inputs.is_constrained:
            self._parallel.broadcast(sampled.token_ids)
        return sampled

    def _forward(self, rows: TokenRows, arrays: list[Tensor]) -> Tensor:
        """Hidden states [tokens, hidden_size] of any batch."""
        batch = self._batch
        input_ids = batch.token_ids.view(-1).index_select(0, arrays[rows.token_positions]).long()
        blocks = batch.block_tables.flatten(1).index_select(1, arrays[rows.block_positions]).long()
        num_blocks = -(-rows.max_seq_len // batch.block_size)
        if batch.loras is not None:
            batch.loras.adapters.use(None if rows.lora_slots is None else arrays[rows.lora_slots])
        block_tables = batch.block_tables[:, :, :num_blocks].index_select(1, arrays[rows.slots])
        slot_mappings = blocks * batch.block_size + arrays[rows.block_offsets]
        images, ends = self._images(rows, arrays)
        metadata = AttentionMetadata(
            query_start_loc=arrays[rows.query_start_loc].int(),
            seq_lens=arrays[rows.seq_lens].int(),
            tables=table_rows(block_tables, slot_mappings),
            num_decodes=rows.num_decodes,
            states=None if rows.states is None else rows.states.on_device(arrays),
            token_types=None if rows.token_types is None else arrays[rows.token_types],
            images=images,
            ends=ends,
        )
        positions = (
            arrays[rows.positions] if rows.rotary_positions is None else arrays[rows.rotary_positions].view(3, -1)
        )
        return self._model(input_ids, positions, self.caches, metadata)

    def _images(self, rows: TokenRows, arrays: list[Tensor]) -> tuple[ImageRows | None, Tensor | None]:
        """The step's `AttentionMetadata.images` and `ends`."""
        if rows.images is None:
            return None, None
        assert self._encodings is not None, "the model reads no images"
        ends = None if rows.images.ends is None else arrays[rows.images.ends].int()
        return self._encodings.rows(rows.images, arrays), ends

    def _decode(self, rows: Tensor, shape: GraphShape) -> Tensor:
        """Hidden states [rows * width, hidden_size] of decodes only, from the columns of `pad_rows` [columns, rows].
        With drafts rows are moved to their true ends and get draft tokens.

        Can be captured: reads fixed memory and does not synchronize with the host.
        """
        if self._drafter is not None:
            self._drafter.propose(rows[:3])
        batch, num_rows, width = self._batch, rows.shape[1], shape.width
        if batch.loras is not None:
            batch.loras.adapters.use(rows[-1].repeat_interleave(width) if shape.has_loras else None)
        deltas = batch.images.position_deltas if batch.images is not None else None
        inputs = decode_inputs(rows[:3], batch.token_ids, batch.block_tables, batch.block_size, width, deltas)
        starts = torch.arange(0, (num_rows + 1) * width, width, dtype=torch.int32, device=rows.device)
        metadata = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=inputs.seq_lens,
            tables=table_rows(inputs.block_tables, inputs.slot_mappings),
            num_decodes=num_rows,
            decode_width=width,
            states=StateRows(rows[3].int(), rows[4].int(), starts, starts) if batch.states is not None else None,
        )
        return self._model(inputs.input_ids, inputs.positions, self.caches, metadata)

    def _prompt_logprobs(self, inputs: StepInputs, arrays: list[Tensor], hidden: Tensor) -> list[LogprobTensors]:
        """Log probabilities of prompt tokens, in slices."""
        rows = inputs.prompt_logprobs
        if rows is None:
            return []
        targets = self._batch.token_ids.view(-1)[arrays[rows.targets]].long()
        slices = zip(arrays[rows.hidden_rows].split(self._prompt_slice), targets.split(self._prompt_slice), strict=True)
        return [
            self._sampler.token_logprobs(self._model.compute_logits(hidden.index_select(0, hidden_rows)), ids)
            for hidden_rows, ids in slices
        ]
