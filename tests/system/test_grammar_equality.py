"""Constrained requests beside plain ones, with chunks, preemption and drafts, on one and two ranks: every request gets
the tokens that it gets alone with all its tokens sampled, and every bounded JSON document is valid."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from proa.contract import EngineCoreRequest, FinishReason, Grammar, SamplingParams, StructuredOutputsParams
from proa.grammar import lower
from proa_engine.builtin import builtin_model_folder
from proa_engine.config import EngineConfig
from proa_engine.core.types import SchedulerOutput
from proa_engine.executor import make_executor
from proa_engine.executor.uniproc import UniProcExecutor
from proa_engine.grammar import NO_LIMITS, LLGuidanceGrammars, make_tokenizer
from proa_engine.json_configs import SpeculativeConfig
from support.engine import Engine, Result, engine_over, request, run, tokens

BOUNDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Wien"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["city", "count", "name"],
    "additionalProperties": False,
}
FORCED: dict[str, Any] = {  # keys of many tokens, which leave no choice
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "the capital of the country": {"enum": ["Paris", "Rome"]},
            "number of inhabitants": {"type": "integer", "maximum": 9999},
        },
        "required": ["the capital of the country", "number of inhabitants"],
        "additionalProperties": False,
    },
    "minItems": 100,
}
ENDLESS = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 100}
FORMS: dict[str, dict[str, Any]] = {
    "bounded": {"json": BOUNDED},
    "endless": {"json": ENDLESS},
    "forced": {"json": FORCED},
    "choice": {"choice": ["a", "ab", "the capital of France"]},
    "regex": {"regex": "[0-9]{3}-[a-z]{4}"},
}
STYLES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.2, "repetition_penalty": 1.2},
]
QUESTIONS = ["What is the capital of France?", "Count: one two one two one two one two one two", "Hello! " * 40]
SETTINGS: dict[str, Any] = {
    "model": "builtin",
    "device": "cpu",
    "max_model_len": 160,
    "block_size": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 28,
    "max_num_seqs": 24,
}
BY_LOAD = ((1, 2, 3), (3, 5, 0), (6, 9, 2), (10, 24, 1))
NGRAMS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, num_speculative_tokens_per_batch_size=BY_LOAD
)
DRAFTER = SpeculativeConfig(method="eagle3", model="builtin", num_speculative_tokens=3)


class Bench:
    """An executor and the grammars of its model, for one core after another."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.config = EngineConfig.from_options(**SETTINGS | settings)
        self.executor: UniProcExecutor = make_executor(self.config, lambda line: None)
        files = builtin_model_folder()
        self.tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
        ll_tokenizer = make_tokenizer(
            (files / "tokenizer.json").read_bytes(),
            vocab_size=self.executor.started.model_config.vocab_size,
            eos_token_ids=self.executor.started.eos_token_ids,
        )
        assert ll_tokenizer is not None
        self.grammars = LLGuidanceGrammars(
            ll_tokenizer,
            self.executor.started.eos_token_ids,
            max_samples=self.config.max_num_seqs * (1 + self.config.num_speculative_tokens),
            make_buffer=self.executor.make_host_buffer,
            num_threads=2,
            limits=NO_LIMITS,
        )
        self.alone: dict[str, Result] = {}
        for each in requests(self.tokenizer):
            self.alone |= run(self.engine(compute_forced_tokens=False), [each])

    def engine(self, *, compute_forced_tokens: bool = True, **settings: Any) -> Engine:
        return engine_over(
            self.executor,
            replace(self.config, **settings),
            grammars=self.grammars,
            compute_forced_tokens=compute_forced_tokens,
        )

    def close(self) -> None:
        self.grammars.close()
        self.executor.shutdown()


def requests(tokenizer: Tokenizer) -> list[EngineCoreRequest]:
    """Requests of all forms and styles, and plain ones, one after another."""
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    grammars: dict[str, Grammar | None] = {
        name: lower(StructuredOutputsParams(**form), added).grammar for name, form in FORMS.items()
    }
    assert grammars["bounded"] is not None
    opening = tuple(tokenizer.encode(word).ids[-1] for word in ("the", " is", " one", " two"))
    grammars["repeated"] = replace(grammars["bounded"], start_after=opening, repeats=True)
    grammars["plain"] = None
    wanted = []
    for index, style in enumerate(STYLES):
        for number, (name, grammar) in enumerate(grammars.items()):
            prompt = tokenizer.encode(QUESTIONS[(index + number) % len(QUESTIONS)]).ids
            params = SamplingParams(max_tokens=48, key=index, ignore_eos=grammar is None, grammar=grammar, **style)
            wanted.append(request(f"{name} {index}", prompt, params))
    return wanted


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"speculative_config": NGRAMS},
        {"speculative_config": DRAFTER},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "speculative_config": DRAFTER},
    ],
    ids=["one rank", "n-grams by load", "drafter", "two ranks", "two ranks, drafter"],
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.close()


def num_preemptions(engine: Engine) -> int:
    return sum(len(plan.preempted_request_ids) for plan in engine.plans)


def has_chunks(plan: SchedulerOutput) -> bool:
    """Whether the step computes a part of a prompt."""
    scheduled = plan.num_scheduled_tokens
    return any(new.num_computed_tokens + scheduled[new.request_id] < len(new.token_ids) for new in plan.new_requests)


def has_drafts(plan: SchedulerOutput, wanted: Iterable[EngineCoreRequest]) -> bool:
    """Whether the step computes several tokens of a constrained request whose prompt is computed."""
    lengths = {each.request_id: len(each.prompt_token_ids) for each in wanted}
    ids = list(plan.num_scheduled_tokens)
    constrained = {ids[row] for row in plan.grammar_rows} & plan.num_chunk_tokens.keys()
    return any(
        known.request_id in constrained and known.num_computed_tokens >= lengths[known.request_id]
        for known in plan.cached_requests
    )


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_constrained_requests_get_the_tokens_that_they_get_alone(bench: Bench, async_scheduling: bool) -> None:
    wanted = requests(bench.tokenizer)
    engine = bench.engine(async_scheduling=async_scheduling)
    assert tokens(run(engine, wanted)) == tokens(bench.alone)
    beside = [plan for plan in engine.plans if plan.grammar_rows]
    assert num_preemptions(engine) > 3
    assert any(map(has_chunks, beside))
    assert engine.core.counters().num_forced_tokens > 50
    assert bench.config.speculative_config is None or any(has_drafts(plan, wanted) for plan in beside)


def test_plain_requests_get_the_tokens_of_a_batch_without_grammars(bench: Bench) -> None:
    plain = [each for each in requests(bench.tokenizer) if each.sampling_params.grammar is None]
    for name, result in run(bench.engine(), plain).items():
        assert result.token_ids == bench.alone[name].token_ids


def test_outputs_are_valid_and_end_where_their_grammar_does(bench: Bench) -> None:
    texts = {name: bench.tokenizer.decode(result.token_ids) for name, result in bench.alone.items()}
    reasons = {name: result.finish_reason for name, result in bench.alone.items()}
    for index in range(len(STYLES)):
        document = json.loads(texts[f"bounded {index}"])
        assert document.keys() == BOUNDED["properties"].keys()
        assert document["city"] in ("Paris", "Rome", "Wien")
        assert 0 <= document["count"] <= 99
        assert len(document["name"]) <= 8
        assert texts[f"choice {index}"] in FORMS["choice"]["choice"]
        digits, letters = texts[f"regex {index}"].split("-")
        assert (len(digits), len(letters)) == (3, 4)
        assert {reasons[f"{name} {index}"] for name in ("bounded", "regex")} == {FinishReason.COMPLETE}
        assert reasons[f"choice {index}"] in (FinishReason.COMPLETE, FinishReason.STOP)
        assert reasons[f"endless {index}"] is FinishReason.LENGTH
        assert texts[f"endless {index}"].startswith('["')
