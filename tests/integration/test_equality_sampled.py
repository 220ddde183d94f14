"""A seeded request samples the same tokens alone, batched, preempted, resumed and as one of several choices."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proa.contract import SamplingParams, choice_key
from support.engine import Engine, build_core, request, run, tokens
from support.sampling_params import TRUNCATED
from support.tiny_models import BYTES, make_tiny_model

NUM_TOKENS = 40
STYLES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    TRUNCATED | {"temperature": 1.2},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "bad_words_token_ids": ((7,), (8, 9))},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 30},
    {"temperature": 1.5, "logit_bias": {65: 5.0}, "logprobs": 2},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(60, 120))},
]
COUNT = 16


def params(index: int) -> SamplingParams:
    style = STYLES[index % len(STYLES)]
    return SamplingParams(max_tokens=NUM_TOKENS, key=choice_key(index, 0), ignore_eos=True, **style)


def prompt(index: int) -> list[int]:
    return [(index * 31 + place * 7) % BYTES for place in range(3 + 5 * (index % 9))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sampled"), "qwen3", seed=8)


@pytest.fixture(scope="module")
def roomy(folder: Path) -> Iterator[Engine]:
    with build_core(folder, max_model_len=128, block_size=8, num_gpu_blocks_override=400, poison=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(roomy: Engine) -> list[list[int]]:
    return [run(roomy, [request("only", prompt(index), params(index))])["only"].token_ids for index in range(COUNT)]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_blocks", [2000, 45])
def test_batched_and_preempted_tokens_equal_those_alone(
    folder: Path, alone: list[list[int]], async_scheduling: bool, num_blocks: int
) -> None:
    config: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 64}
    config |= {"num_gpu_blocks_override": num_blocks, "async_scheduling": async_scheduling}
    with build_core(folder, poison=True, block_seed=4, **config) as engine:
        results = run(engine, [request(str(index), prompt(index), params(index)) for index in range(COUNT)])
        assert (engine.core.stats().num_preemptions > 0) == (num_blocks == 45)
    assert list(tokens(results).values()) == alone


def test_a_resumed_request_samples_the_same_tokens(roomy: Engine, alone: list[list[int]]) -> None:
    cuts = [1 + (index * 5) % (NUM_TOKENS - 1) for index in range(COUNT)]
    requests = [
        request(str(index), prompt(index), params(index), resumed=alone[index][:cut]) for index, cut in enumerate(cuts)
    ]
    results = run(roomy, requests)
    for index, cut in enumerate(cuts):
        assert results[str(index)].token_ids == alone[index][cut:]


def test_each_of_n_choices_equals_itself_alone_and_differs_from_the_others(roomy: Engine) -> None:
    def choice(index: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, key=choice_key(1234, index))

    together = run(roomy, [request(str(index), prompt(0), choice(index)) for index in range(5)])
    for index in range(5):
        assert run(roomy, [request("x", prompt(0), choice(index))])["x"].token_ids == together[str(index)].token_ids
    assert len({tuple(result.token_ids) for result in together.values()}) == 5


def test_a_repeated_prompt_computes_only_its_uncached_tokens(folder: Path) -> None:
    with build_core(folder, max_model_len=128, block_size=8) as engine:
        wanted = [(place * 11) % BYTES for place in range(43)]
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        first = run(engine, [request("first", wanted, greedy)])["first"]
        num_plans = len(engine.plans)
        second = run(engine, [request("second", wanted, greedy)])["second"]
        assert engine.plans[0].num_scheduled_tokens["first"] == 43
        assert engine.plans[num_plans].num_scheduled_tokens["second"] == 43 - 40
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
        assert first.token_ids == second.token_ids


def test_prompt_logprobs_are_complete_with_chunked_prefill_and_preemption(folder: Path, roomy: Engine) -> None:
    wanted = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    requests = [request(str(index), [*prompt(index + 5), index], wanted) for index in range(8)]
    plain = run(roomy, requests)
    config: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 16}
    with build_core(folder, poison=True, num_gpu_blocks_override=20, **config) as engine:
        pressed = run(engine, requests)
        assert engine.core.stats().num_preemptions > 0
    for name, result in plain.items():
        actual = pressed[name]
        assert [part.token_id for part in actual.prompt_logprobs] == [*prompt(int(name) + 5), int(name)][1:]
        assert [part.logprob for part in actual.prompt_logprobs] == pytest.approx(
            [part.logprob for part in result.prompt_logprobs], abs=1e-5
        )
        assert [part.token_id for part in actual.logprobs] == actual.token_ids == result.token_ids
