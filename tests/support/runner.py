"""A ModelRunner over a fake model whose logits are a fixed function of the last token and its position."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proa.contract import SamplingParams, TokenLogprobs
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.types import CachedRequestData, Drafts, ModelRunnerOutput, NewRequestData, SchedulerOutput
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.cache_layers import LayerCache
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory.cache_plan import CacheMemory
from proa_engine.models.image_config import ImageConfig
from proa_engine.step.async_output import collect
from proa_engine.step.columns import Columns
from proa_engine.step.decode_graphs import DecodeGraphs, Graph, graph_shapes
from proa_engine.step.drafts import NgramDrafts
from proa_engine.step.image_attention import attention_columns
from proa_engine.step.input_batch import InputBatch
from proa_engine.step.logprobs import PromptLogprobColumns
from proa_engine.step.loras import LoraAdapters, LoraColumns
from proa_engine.step.media import EncodedMedia, MediaColumns, MediaEncodings
from proa_engine.step.model_runner import ModelRunner
from proa_engine.step.prompt_graphs import PromptGraphs, PromptShape
from proa_engine.step.sampling import SamplingColumns
from proa_engine.step.slots import SlotTables
from proa_engine.step.step_inputs import InputBuilder, StepInputs

VOCAB_SIZE = 300
BLOCK_SIZE = 4
EOS = 2


def make_batch(
    *,
    max_num_seqs: int,
    max_model_len: int = 256,
    block_size: int = BLOCK_SIZE,
    vocab_size: int = VOCAB_SIZE,
    drafts: SpeculativeConfig | None = None,
    loras: LoraAdapters | None = None,
    images: ImageConfig | None = None,
    encodings: MediaEncodings | None = None,
    compute_logits: Callable[[Tensor], Tensor] | None = None,
    max_logprobs: int = 5,
) -> InputBatch:
    """`compute_logits` is the model's, for log probabilities of prompts."""
    tables = SlotTables(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        vocab_size=vocab_size,
        device=torch.device("cpu"),
        has_position_deltas=images is not None and images.has_three_positions,
    )
    features: list[Columns] = []
    if compute_logits is not None:
        features.append(PromptLogprobColumns(tables, compute_logits, max_logprobs))
    if images is not None:
        features.append(MediaColumns(tables) if encodings is None else EncodedMedia(tables, encodings))
        features += attention_columns(tables, images)
    if drafts is not None:
        features.append(NgramDrafts(tables, drafts))
    if loras is not None:
        features.append(LoraColumns(tables, loras))
    return InputBatch(tables, SamplingColumns(tables, [EOS]), features)


def input_builder(batch: InputBatch, graphs: DecodeGraphs | None = None, max_small_tokens: int = 0) -> InputBuilder:
    """`graphs` None: none are captured."""
    device = batch.tables.device
    return InputBuilder(batch, graphs or DecodeGraphs((), device), PromptGraphs((), batch.tables), max_small_tokens)


class FakeModel:
    """Hidden states are (token, position); logits are the sum of two tables' rows. Records its calls."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.by_token = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) * 2
        self.by_position = torch.randn(512, VOCAB_SIZE, generator=generator) * 2
        self.calls: list[tuple[Tensor, Tensor, Any]] = []
        self.logit_rows: list[int] = []

    def __call__(self, input_ids: Tensor, positions: Tensor, caches: list[LayerCache], metadata: Any) -> Tensor:
        self.calls.append((input_ids, positions, metadata))
        return torch.stack([input_ids, positions], dim=1).float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.logit_rows.append(hidden.shape[0])
        return self.by_token[hidden[:, 0].long()] + self.by_position[hidden[:, 1].long()]

    def logits_after(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [vocab] of the token after these."""
        return self.by_token[token_ids[-1]] + self.by_position[len(token_ids) - 1]


class FakeCapture:
    """Replays by calling the functions again. Like a CUDA graph, each writes its result to the same tensor every time.

    Counts the replays of the layers, and the draws, the replays of the graphs that sample from their results.
    """

    def __init__(self) -> None:
        self.num_replays = self.num_draws = 0

    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Graph]:
        def run_first() -> None:
            self.num_replays += 1
            hidden.copy_(first())

        def run_draw() -> None:
            self.num_draws += 1
            drawn.copy_(draw(hidden))

        hidden = first()
        if not others:
            return [Graph(run_first, hidden)]
        (draw,) = others
        drawn = draw(hidden)
        return [Graph(run_first, hidden), Graph(run_draw, drawn)]


@dataclass
class StepResult:
    """A step's result by row: a request's accepted drafts and its sampled token."""

    request_ids: list[str]
    sampled_token_ids: list[list[int]]
    drafts: dict[str, Drafts]
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs]]

    @classmethod
    def of(cls, request_ids: list[str], output: ModelRunnerOutput) -> "StepResult":
        others, plain = output.others, iter(output.plain_token_ids)
        sampled = [list(others[name].sampled_token_ids) if name in others else [next(plain)] for name in request_ids]
        assert not list(plain)
        drafts = {name: row.drafts for name, row in others.items() if row.drafts is not None}
        logprobs = {name: list(row.logprobs) for name, row in others.items() if row.logprobs}
        prompt_logprobs = {name: list(row.prompt_logprobs) for name, row in others.items() if row.prompt_logprobs}
        return cls(request_ids, sampled, drafts, logprobs, prompt_logprobs)


class RunnerHarness:
    """Runs hand-made steps. Blocks are allocated in order and never reused."""

    def __init__(
        self,
        model: FakeModel | None = None,
        *,
        max_num_seqs: int = 64,
        max_logprobs: int = 5,
        graphs: bool = False,
        prompt_shapes: Sequence[PromptShape] = (),
        drafts: SpeculativeConfig | None = None,
        parallel: ParallelContext | None = None,
        loras: LoraAdapters | None = None,
        images: ImageConfig | None = None,
        encodings: MediaEncodings | None = None,
    ) -> None:
        self.model = model or FakeModel()
        self.batch = make_batch(
            max_num_seqs=max_num_seqs,
            drafts=drafts,
            loras=loras,
            images=images,
            encodings=encodings,
            compute_logits=self.model.compute_logits,
            max_logprobs=max_logprobs,
        )
        max_drafts = 0 if drafts is None else drafts.max_drafts
        shapes = graph_shapes(max_num_seqs, max_drafts, with_loras=loras is not None)
        self.runner = ModelRunner(
            self.model,  # type: ignore[arg-type]
            CacheMemory(),
            self.batch,
            max_logprobs=max_logprobs,
            parallel=parallel,
            graphs=DecodeGraphs(shapes, torch.device("cpu")) if graphs else None,
            prompt_graphs=PromptGraphs(prompt_shapes, self.batch.tables) if prompt_shapes else None,
        )
        self.capture = FakeCapture()
        if graphs:
            self.runner.capture_graphs(self.capture)
        self.num_blocks = 0

    def step(self, *arguments: Any, masks: GrammarMasks | None = None, **options: Any) -> StepResult:
        """Schedule a step, with the arguments of `schedule`, and run it. The rows of `masks` are its grammar rows."""
        plan = self.schedule(*arguments, **options)
        plan.grammar_rows = [] if masks is None else list(masks.rows)
        return self.run(self.runner.prepare_inputs(plan), masks)

    def run(self, inputs: StepInputs | None, masks: GrammarMasks | None = None) -> StepResult:
        if inputs is None:
            return StepResult([], [], {}, {}, {})
        self.runner.execute_model(inputs)
        return StepResult.of(inputs.request_ids, collect(self.runner.sample_tokens(masks), inputs))

    def schedule(
        self,
        new: Mapping[str, tuple[Sequence[int], int, SamplingParams]] | None = None,
        known: Mapping[str, int] | None = None,
        *,
        scheduled: Mapping[str, int] | None = None,
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
    ) -> SchedulerOutput:
        """A step. `new`: id -> (tokens, prompt length, params); `known`: id -> number of computed tokens.

        New requests compute all of their tokens and known ones one token, except those in `scheduled`.
        """
        counts = {name: len(tokens) for name, (tokens, _, _) in (new or {}).items()}
        counts |= dict.fromkeys(known or {}, 1)
        counts |= scheduled or {}
        return SchedulerOutput(
            step=1,
            new_requests=[
                NewRequestData(
                    request_id=name,
                    token_ids=list(tokens),
                    num_prompt_tokens=num_prompt,
                    num_computed_tokens=0,
                    block_ids=[self._blocks(0, counts[name])],
                    sampling_params=params,
                )
                for name, (tokens, num_prompt, params) in (new or {}).items()
            ],
            cached_requests=[
                CachedRequestData(
                    request_id=name,
                    num_computed_tokens=computed,
                    new_block_ids=[self._blocks(computed, computed + counts[name])],
                )
                for name, computed in (known or {}).items()
            ],
            decode_request_ids=[name for name, count in counts.items() if count == 1],
            num_chunk_tokens={name: count for name, count in counts.items() if count > 1},
            finished_request_ids=list(finished),
            preempted_request_ids=list(preempted),
        )

    def generate(self, token_ids: Sequence[int], params: SamplingParams, count: int) -> list[int]:
        """`count` tokens of one request, alone."""
        output = self.step({"alone": (token_ids, len(token_ids), params)})
        tokens = list(output.sampled_token_ids[0])
        while len(tokens) < count:
            tokens += self.step(known={"alone": len(token_ids) + len(tokens) - 1}).sampled_token_ids[0]
        self.step(finished=["alone"])
        return tokens

    def _blocks(self, start: int, end: int) -> list[int]:
        held, needed = -(-start // BLOCK_SIZE), -(-end // BLOCK_SIZE)
        first, self.num_blocks = self.num_blocks, self.num_blocks + needed - held
        return list(range(first, self.num_blocks))
