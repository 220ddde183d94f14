"""ModelRunner: turns a SchedulerOutput into a forward pass and sampled tokens on one device."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.types import SchedulerOutput
from proa_engine.kernels.sampling.decode_inputs import decode_inputs
from proa_engine.layers.attention_metadata import AttentionMetadata, decode_metadata, table_rows
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory.cache_plan import CacheMemory
from proa_engine.models.base import CausalLM
from proa_engine.observability.worker_spans import NoWorkerTracer, WorkerTracer
from proa_engine.step.async_output import StepTensors
from proa_engine.step.columns import Computed, ForwardInputs, Replayed, TokenRows
from proa_engine.step.decode_graphs import DecodeGraphs, GraphCapture, GraphShape
from proa_engine.step.device_thread import SmallSteps
from proa_engine.step.input_batch import InputBatch
from proa_engine.step.logprobs import LogprobTensors
from proa_engine.step.pipeline import StageIO
from proa_engine.step.prompt_graphs import PromptGraphs
from proa_engine.step.sampler import SampledTokens, Sampler, ship_masks
from proa_engine.step.sampling import SamplingInputs
from proa_engine.step.staging import Staging
from proa_engine.step.step_inputs import DecodeRows, InputBuilder, PromptRows, StepInputs

NO_REST = Replayed(lambda: None)  # of a graph behind which nothing is captured


@dataclass(frozen=True, slots=True)
class _ForwardResult:
    """The state of a step between its forward pass and its sampling."""

    inputs: StepInputs
    arrays: list[Tensor]
    result: Tensor  # of this stage's layers, [tokens, hidden_size]
    forward: ForwardInputs | Replayed


class WholeModel:
    """The model's only stage."""

    is_whole = samples = True

    def receive(self, inputs: StepInputs) -> None:
        return None

    def graph_input(self, num_tokens: int) -> None:
        return None

    def send(self, result: Tensor, inputs: StepInputs, arrays: Sequence[Tensor]) -> None:
        pass

    def finish(self, result: Tensor, inputs: StepInputs) -> tuple[Tensor, StepInputs]:
        return result, inputs


class ModelRunner:
    """Runs steps. For each step call `prepare_inputs`, `execute_model` and `sample_tokens`.

    `prepare_inputs` is host work and may run while earlier steps compute. The other two are device work, in the order
    of the steps. With pipeline stages later steps may be executed before a step is sampled, but none that computes what
    it samples, and none before which its requests are removed. Steps of decodes alone are replayed as `graphs`, others
    that fit as `prompt_graphs`, once those are captured.
    """

    def __init__(
        self,
        model: CausalLM,
        memory: CacheMemory,
        batch: InputBatch,
        *,
        max_logprobs: int,
        parallel: ParallelContext | None = None,
        stage: StageIO | None = None,
        graphs: DecodeGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
        small_steps: SmallSteps | None = None,
        tracer: WorkerTracer | NoWorkerTracer | None = None,
    ) -> None:
        self.device = batch.tables.device
        self.caches = memory.layers
        self.memory = memory
        self._model = model
        self._batch = batch
        self._tables = batch.tables
        self._parallel = parallel or ParallelContext()
        self._stage = stage or WholeModel()
        self._sampler = Sampler(batch, max_logprobs)
        self._staging = Staging(self.device)
        self._graphs = graphs or DecodeGraphs((), self.device)
        self._prompt_graphs = prompt_graphs or PromptGraphs((), batch.tables)
        self._small_steps = small_steps or SmallSteps(0)
        self._input_builder = InputBuilder(batch, self._graphs, self._prompt_graphs, self._small_steps.max_tokens)
        self._tracer = tracer or NoWorkerTracer()
        self._draws = False  # whether graphs sample the tokens of decodes that need nothing else
        self._results: deque[_ForwardResult] = deque()  # of steps that are executed and not sampled, oldest first

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> StepInputs | None:
        """Update the host side of the batch and lay out the step. None if it computes no tokens."""
        self._tracer.update(scheduler_output)
        return self._input_builder.build(scheduler_output)

    @torch.inference_mode()
    def execute_model(self, inputs: StepInputs) -> None:
        """Run this rank's layers over the step's tokens and keep the result for `sample_tokens`."""
        with self._small_steps.one_thread(inputs.is_small):
            arrays = list(self._staging.ship(inputs.arrays))
            inputs.edits.apply(arrays)
            for part in inputs.parts:
                part.before_forward(arrays)
            received = self._stage.receive(inputs)
            forward: ForwardInputs | Replayed = NO_REST
            match inputs.rows:
                case TokenRows() as rows:
                    forward, result = self._forward(rows, arrays, received)
                case PromptRows(shape, values):
                    result = self._prompt_graphs.replay(shape, arrays[values])[: inputs.num_tokens]
                case DecodeRows(shape, values):
                    result = self._graphs.replay(shape, arrays[values])[: len(inputs.request_ids) * shape.width]
                    forward = Replayed(partial(self._graphs.replay_rest, shape))
                    for part in inputs.parts:
                        part.after_replay(arrays)
            self._stage.send(result, inputs, arrays)
        if self._stage.samples:
            self._results.append(_ForwardResult(inputs, arrays, result, forward))

    @torch.inference_mode()
    def sample_tokens(self, masks: GrammarMasks | None = None) -> StepTensors:
        """Sample the tokens of the oldest executed step that is not sampled, and write them to the token table for
        later ones. Also compute the results of features.

        A rank other than 0 gets no masks and returns no log probabilities of a constrained step's samples. One of a
        later pipeline stage does nothing.
        """
        if not self._stage.samples:
            return StepTensors()
        step = self._results.popleft()
        with self._small_steps.one_thread(step.inputs.is_small):
            hidden, inputs = self._stage.finish(step.result, step.inputs)
            if self._draws and (shape := inputs.draw_shape) is not None:
                drawn = self._graphs.replay_rest(shape)[: len(inputs.request_ids)]
                return StepTensors(drawn.clone())  # the next draw may run before the copy to the host
            token_ids: Tensor | None = None
            logprobs: LogprobTensors | None = None
            if (sampling := inputs.sampling) is not None:
                sampled = self._sample(hidden, inputs, sampling, step.arrays, masks)
                token_ids, logprobs = sampled.token_ids, sampled.logprobs
                self._tables.flat_token_ids.index_copy_(0, step.arrays[sampling.write_to], token_ids.int())
            computed = Computed(hidden, step.forward)
            results = [part.after_sample(step.arrays, computed, token_ids) for part in inputs.parts]
            return StepTensors(token_ids, logprobs, results)

    @torch.inference_mode()
    def capture_graphs(self, capture: GraphCapture) -> None:
        """Capture the graphs that the runner has, of decodes last."""
        self._prompt_graphs.capture(lambda rows, arrays: self._forward(rows, arrays)[1], capture)
        self._draws = self._stage.is_whole and not self._batch.has_drafts
        rest = [feature.after_decodes for feature in self._batch.features if feature.follows_decodes]
        self._graphs.capture(self._decode, capture, *([self._draw] if self._draws else rest))

    def release(self) -> None:
        """Free the KV cache and delete the graphs. The runner can run no more steps."""
        self.clear_graphs()
        self.memory.free()

    def clear_graphs(self) -> None:
        self._prompt_graphs.clear()
        self._graphs.clear()

    def _sample(
        self,
        hidden: Tensor,
        inputs: StepInputs,
        sampling: SamplingInputs,
        arrays: list[Tensor],
        masks: GrammarMasks | None,
    ) -> SampledTokens:
        """Sample the step's tokens. Only rank 0 has the masks of grammars, so it alone samples a constrained step and
        broadcasts the tokens."""
        rows = hidden if sampling.hidden_rows is None else hidden.index_select(0, arrays[sampling.hidden_rows])
        logits = self._model.compute_logits(rows)
        if inputs.is_constrained and self._parallel.rank:
            token_ids = torch.empty(sampling.num_rows, dtype=torch.int64, device=self.device)
            return SampledTokens(self._parallel.broadcast(token_ids), None)
        on_device = None if masks is None else ship_masks(masks, sampling, self._staging)
        sampled = self._sampler.sample(logits, sampling, arrays, on_device)
        if inputs.is_constrained:
            self._parallel.broadcast(sampled.token_ids)
        return sampled

    def _forward(
        self, rows: TokenRows, arrays: Sequence[Tensor], received: Tensor | None = None
    ) -> tuple[ForwardInputs, Tensor]:
        """Return the inputs of the layers and the hidden states [tokens, hidden_size] of any batch, from what the stage
        before sent."""
        tables = self._tables
        model_inputs = received
        if model_inputs is None:
            model_inputs = tables.flat_token_ids.index_select(0, arrays[rows.token_positions]).long()
        blocks = tables.block_tables.flatten(1).index_select(1, arrays[rows.block_positions]).long()
        num_blocks = -(-rows.max_seq_len // tables.block_size)
        block_tables = tables.block_tables[:, :, :num_blocks].index_select(1, arrays[rows.slots])
        slot_mappings = blocks * tables.block_size + arrays[rows.block_offsets]
        metadata = AttentionMetadata(
            query_start_loc=arrays[rows.query_start_loc].int(),
            seq_lens=arrays[rows.seq_lens].int(),
            tables=table_rows(block_tables, slot_mappings),
            num_decodes=rows.num_decodes,
        )
        forward = ForwardInputs(model_inputs, arrays[rows.positions], metadata)
        for feature in rows.features:
            feature.fill(forward, arrays)
        return forward, self._model(forward.inputs, forward.positions, self.caches, metadata)

    def _decode(self, rows: Tensor, shape: GraphShape) -> Tensor:
        """Return the hidden states [rows * width, hidden_size] of decodes only, from the columns of `pad_rows`
        [columns, rows].

        Can be captured: it reads fixed memory and does not synchronize with the host.
        """
        tables, width = self._tables, shape.width
        for feature in self._batch.features:
            feature.before_decodes(rows, shape)
        inputs = decode_inputs(
            rows[:3], tables.token_ids, tables.block_tables, tables.block_size, width, tables.position_deltas
        )
        metadata = decode_metadata(inputs, width)
        received = self._stage.graph_input(shape.num_tokens)
        forward = ForwardInputs(inputs.input_ids if received is None else received, inputs.positions, metadata)
        for feature in self._batch.features:
            feature.fill_decodes(forward, rows, shape)
        return self._model(forward.inputs, forward.positions, self.caches, metadata)

    def _draw(self, rows: Tensor, shape: GraphShape, hidden: Tensor) -> Tensor:
        """Return a token after each row of `_decode` with a width of 1, [rows] int64, also written to the token table.
        Can be captured."""
        return self._sampler.draw_decodes(self._model.compute_logits(hidden), rows[:3])
