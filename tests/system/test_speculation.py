"""N-gram speculation changes no token: greedy and sampled, asynchronous or not, with preemption, at every limit, on two
ranks and in replayed graphs; and draft tokens are accepted where a text repeats."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from proa.contract import EngineCoreRequest, FinishReason, SamplingParams
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.step.decode_graphs import graph_shapes
from proa_engine.worker.worker import Worker
from support.engine import Engine, Result, build_core, request, run, tokens
from support.oracle_drafts import CHANGING
from support.runner import FakeCapture
from support.sampling_params import TRUNCATED
from support.tiny_models import BYTES, make_tiny_model

CONFIG: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 64, "block_seed": 4}
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3)
STYLES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "logprobs": 1},
    {"temperature": 0.1, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.5},
    TRUNCATED | {"temperature": 0.4, "logit_bias": {65: 1.0}, "bad_words_token_ids": ((66,),)},
    {"temperature": 0.0, "min_tokens": 20, "bad_words_token_ids": ((7,), (8, 9))},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
]


def prompt(index: int) -> list[int]:
    """A prompt of distinct tokens, or for odd numbers of four tokens repeated."""
    period = 4 if index % 2 else 97
    return [(index * 31 + place % period * 7) % BYTES for place in range(3 + 5 * (index % 8))]


def requests() -> list[EngineCoreRequest]:
    """Requests of all styles, with different numbers of tokens, some up to the end of the context."""
    wanted = []
    for index in range(28):
        max_tokens = None if index % 9 == 8 else 30 + index % 5
        params = SamplingParams(max_tokens=max_tokens, key=index, ignore_eos=True, **STYLES[index % len(STYLES)])
        wanted.append(request(str(index), prompt(index), params))
    return wanted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("speculation"), "qwen3", seed=8)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    with build_core(folder, **CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> dict[str, Result]:
    return run(plain, requests())


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Iterator[Engine]:
    with build_core(folder, poison=True, speculative_config=DRAFTS, **CONFIG) as engine:
        yield engine


@contextmanager
def drafting_in_graphs(folder: Path, **settings: Any) -> Iterator[tuple[Engine, FakeCapture]]:
    """A drafting engine that replays steps of decodes with up to four rows."""
    shapes, capture = graph_shapes(4, DRAFTS.max_drafts), FakeCapture()
    with (
        mock.patch.object(Worker, "_graph_shapes", return_value=shapes),
        mock.patch.object(Worker, "_graph_capture", return_value=capture),
        build_core(folder, poison=True, speculative_config=DRAFTS, **CONFIG | settings) as engine,
    ):
        yield engine, capture


def assert_same(actual: dict[str, Result], expected: dict[str, Result]) -> None:
    assert tokens(actual) == tokens(expected)
    for name, result in expected.items():
        told = actual[name]
        assert told.finish_reason is result.finish_reason
        assert [part.token_id for part in told.logprobs] == [part.token_id for part in result.logprobs]
        assert [part.rank for part in told.logprobs] == [part.rank for part in result.logprobs]
        assert [part.logprob for part in told.logprobs] == pytest.approx([part.logprob for part in result.logprobs])
        assert len(told.prompt_logprobs) == len(result.prompt_logprobs)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_blocks", [2000, 30])
def test_tokens_and_logprobs_equal_those_without_speculation(
    folder: Path, expected: dict[str, Result], async_scheduling: bool, num_blocks: int
) -> None:
    settings = {"num_gpu_blocks_override": num_blocks, "async_scheduling": async_scheduling}
    with build_core(folder, poison=True, speculative_config=DRAFTS, **CONFIG, **settings) as engine:
        results = run(engine, requests())
        stats, counters = engine.core.stats(), engine.core.counters()
    assert_same(results, expected)
    assert (stats.num_preemptions > 0) == (num_blocks == 30)
    assert 0 < counters.drafts.num_accepted_tokens < counters.drafts.num_draft_tokens
    assert 0 < counters.drafts.num_drafts < counters.drafts.num_draft_tokens


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_tokens_and_logprobs_are_the_same_where_the_number_of_drafts_follows_the_load(
    folder: Path, expected: dict[str, Result], async_scheduling: bool
) -> None:
    drafts = replace(DRAFTS, num_speculative_tokens_per_batch_size=CHANGING)
    settings: dict[str, Any] = {"speculative_config": drafts, "async_scheduling": async_scheduling, "max_num_seqs": 7}
    with build_core(folder, poison=True, **CONFIG, **settings) as engine:
        assert_same(run(engine, requests()), expected)
        sizes = {size - 1 for plan in engine.plans for size in plan.num_scheduled_tokens.values()}
        assert any(len(plan.decode_request_ids) - len(plan.cached_requests) >= 4 for plan in engine.plans)
    assert sizes >= {0, 1, 2, 3}


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_blocks", [2000, 18])
def test_tokens_and_logprobs_equal_those_of_replayed_steps(
    folder: Path, expected: dict[str, Result], async_scheduling: bool, num_blocks: int
) -> None:
    settings = {"num_gpu_blocks_override": num_blocks, "async_scheduling": async_scheduling, "max_num_seqs": 5}
    with drafting_in_graphs(folder, **settings) as (engine, capture):
        assert_same(run(engine, requests()), expected)
        assert len(engine.plans) / 4 < capture.num_replays < len(engine.plans)
        assert engine.core.counters().drafts.num_accepted_tokens > 0
        assert (engine.core.stats().num_preemptions > 0) == (num_blocks == 18)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_replayed_steps_of_requests_that_come_and_are_aborted(
    folder: Path, expected: dict[str, Result], async_scheduling: bool, seed: int
) -> None:
    rng = random.Random(seed)
    settings = {"num_gpu_blocks_override": rng.choice([20, 40, 2000]), "max_num_seqs": rng.randint(2, 4)}
    with drafting_in_graphs(folder, async_scheduling=async_scheduling, **settings) as (engine, capture):
        waiting = rng.sample(requests(), 28)
        received: dict[str, list[int]] = {}
        aborted = set()
        while waiting or engine.core.has_unfinished_requests():
            if waiting and rng.random() < 0.2:
                received[waiting[-1].request_id] = []
                engine.core.submit(waiting.pop())
            if received and rng.random() < 0.02:
                aborted.add(name := rng.choice(list(received)))
                engine.core.abort([name])
            outputs = engine.core.step()
            engine.core.check_integrity()
            if outputs is None:
                continue
            for request_id, token_id in zip(outputs.plain.request_ids, outputs.plain.token_ids, strict=True):
                received[request_id].append(token_id)
            for output in outputs.outputs:
                received[output.request_id] += output.new_token_ids
        assert capture.num_replays > 0
    for name, result in expected.items():
        whole = result.token_ids
        assert received[name] == (whole[: len(received[name])] if name in aborted else whole), name


def test_a_repeating_text_takes_a_fraction_of_the_steps(plain: Engine, drafting: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, allowed_token_ids=(70,))
    wanted = [request("loop", prompt(3), params)]
    steps, results = [], []
    for engine in (plain, drafting):
        before = len(engine.plans)
        results.append(run(engine, wanted)["loop"].token_ids)
        steps.append(len(engine.plans) - before)
    assert results == [[70] * 90] * 2
    assert steps[1] < steps[0] / 3


@pytest.mark.parametrize("num_tokens", range(8, 13))
def test_max_tokens_ends_the_output_within_accepted_draft_tokens(drafting: Engine, num_tokens: int) -> None:
    params = SamplingParams(
        temperature=0.5, max_tokens=num_tokens, ignore_eos=True, allowed_token_ids=(70,), logprobs=0
    )
    result = run(drafting, [request("loop", prompt(3), params)])["loop"]
    assert result.token_ids == [70] * num_tokens
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.logprobs) == num_tokens


def test_a_stop_token_ends_the_output_within_accepted_draft_tokens(plain: Engine, drafting: Engine) -> None:
    def wanted(**params: Any) -> list[EngineCoreRequest]:
        few = tuple(range(70, 73))
        return [
            request(str(key), prompt(3), SamplingParams(temperature=1.0, allowed_token_ids=few, key=key, **params))
            for key in range(20)
        ]

    free = tokens(run(plain, wanted(max_tokens=60, ignore_eos=True)))
    stopped = run(drafting, wanted(max_tokens=60, stop_token_ids=(71,), ignore_eos=True))
    for name, output in free.items():
        assert stopped[name].token_ids == output[: output.index(71) + 1]
        assert stopped[name].finish_reason is FinishReason.STOP


def test_a_resumed_request_continues_with_speculation(expected: dict[str, Result], drafting: Engine) -> None:
    resumed = [
        request(
            wanted.request_id,
            wanted.prompt_token_ids,
            wanted.sampling_params,
            resumed=expected[wanted.request_id].token_ids[: 1 + int(wanted.request_id)],
        )
        for wanted in requests()
    ]
    for name, result in run(drafting, resumed).items():
        assert result.token_ids == expected[name].token_ids[1 + int(name) :]


def test_blocks_of_accepted_draft_tokens_are_prefix_cache_hits(plain: Engine, drafting: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    first = run(drafting, [request("first", prompt(5), params)])["first"]
    again = [*prompt(5), *first.token_ids, 1, 2, 3]
    later = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = run(drafting, [request("later", again, later)])["later"]
    assert found.num_cached_tokens >= len(prompt(5)) + 48
    assert found.token_ids == run(plain, [request("later", again, later)])["later"].token_ids


def test_two_ranks_accept_the_same_draft_tokens(folder: Path, expected: dict[str, Result]) -> None:
    with build_core(folder, tensor_parallel_size=2, speculative_config=DRAFTS, **CONFIG) as engine:
        results = run(engine, requests()[:7])
        assert engine.core.counters().drafts.num_accepted_tokens > 0
    equal = [result.token_ids == expected[name].token_ids for name, result in results.items()]
    assert sum(equal) >= len(equal) - 1  # the ranks' sums may round differently where two logits are close


@pytest.mark.parametrize("num_blocks", [2000, 60])
def test_drafts_change_no_token_with_windows_in_tables(num_blocks: int, tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path, "olmo3", seed=8, layer_types=["sliding_attention", "full_attention"], sliding_window=20
    )
    wanted = requests()[:14]
    with build_core(folder, **CONFIG) as engine:
        expected = run(engine, wanted)
    settings = {"num_gpu_blocks_override": num_blocks, "max_num_seqs": 12}
    with build_core(folder, poison=True, speculative_config=DRAFTS, **CONFIG, **settings) as engine:
        assert engine.executor.started.cache_groups.windows == (20,)
        for _ in range(2):
            assert_same(run(engine, wanted), expected)
        stats, counters = engine.core.stats(), engine.core.counters()
    assert (stats.num_preemptions > 0) == (num_blocks == 60)
    assert 0 < counters.drafts.num_accepted_tokens < counters.drafts.num_draft_tokens
