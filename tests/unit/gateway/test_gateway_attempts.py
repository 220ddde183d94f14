"""RequestAttempts: how often, when, where and with what a failed sequence is sent again."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proa.contract import EngineCoreRequest, Grammar, PoolingParams, PoolingTask, SamplingParams
from proa_gateway.engines.attempts import (
    FIRST_BACKOFF,
    LAST_BACKOFF,
    MAX_ATTEMPTS,
    MAX_OVERLOADED,
    RequestAttempts,
    RetryBudget,
    backoff,
)
from proa_gateway.engines.client import EngineClient
from proa_gateway.errors import EngineLost, EngineUnavailable, GatewayError, Overloaded
from proa_gateway.routing.policies import RoutingHints
from support.model_info import model_info

LOST, FULL, UNAVAILABLE = EngineLost("lost"), Overloaded("full"), EngineUnavailable("not now")


def engine(address: str = "a", **info: Any) -> EngineClient:
    return cast(EngineClient, SimpleNamespace(address=address, hello=SimpleNamespace(model=model_info(**info))))


def sent_once(num_tokens: int = 0, **params: Any) -> RequestAttempts:
    """A sequence that was sent once and has received `num_tokens` tokens."""
    sampling_params = SamplingParams(key=7, **params)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2], sampling_params=sampling_params)
    made = RequestAttempts(request, RoutingHints(), last_progress=10.0)
    made.record_sent(engine())
    made.update_progress(num_tokens, 1.0)
    return made


def delays(made: RequestAttempts, *errors: GatewayError, budget: RetryBudget | None = None) -> list[float | None]:
    budget = budget or RetryBudget()
    return [made.record_failure(error, 10.0 + index / 10, budget, 1.0) for index, error in enumerate(errors)]


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_after_a_lost_engine_it_is_sent_at_once_but_only_max_attempts_times(num_tokens: int) -> None:
    assert delays(sent_once(num_tokens), *[LOST] * MAX_ATTEMPTS) == [0.0] * (MAX_ATTEMPTS - 1) + [None]


def test_a_new_token_resets_the_failure_counts() -> None:
    made = sent_once(5)
    for num_tokens in range(6, 20):
        assert delays(made, LOST) == [0.0]
        made.record_sent(engine(f"e{num_tokens}"))
        made.update_progress(num_tokens, 2.0)
        assert (made.failed_at, made.tried) == (None, [f"e{num_tokens}"])


def test_a_rejected_request_without_tokens_is_given_up_after_max_attempts() -> None:
    assert delays(sent_once(), *[FULL] * MAX_ATTEMPTS) == [FIRST_BACKOFF, 2 * FIRST_BACKOFF, None]
    assert delays(sent_once(), LOST, UNAVAILABLE, FULL) == [0.0, FIRST_BACKOFF, None]


def test_a_request_that_waited_in_an_overloaded_engine_is_given_up() -> None:
    late = 10.0 + 1.5 * MAX_OVERLOADED
    assert sent_once().record_failure(FULL, late, RetryBudget(), 1.0) is None
    assert sent_once().record_failure(UNAVAILABLE, late, RetryBudget(), 1.0) == FIRST_BACKOFF, "an engine that drains"
    assert sent_once(5).record_failure(FULL, late, RetryBudget(), 1.0) == FIRST_BACKOFF


def test_a_rejected_request_with_tokens_is_sent_again_without_limit() -> None:
    made = sent_once(5)
    results = delays(made, LOST, *[FULL, UNAVAILABLE] * 20)
    assert None not in results
    assert results[-1] == LAST_BACKOFF
    assert made.failed_at == 10.0
    assert made.lost_error is LOST


def test_retries_of_rejected_requests_are_limited_to_a_share_of_all_requests() -> None:
    budget = RetryBudget(share=0.25, reserve=2.0)
    assert [delays(sent_once(), FULL, budget=budget)[0] is None for _ in range(4)] == [False, False, True, True]
    for _ in range(4):
        budget.add_request()
    assert [delays(sent_once(), FULL, budget=budget)[0] is None for _ in range(2)] == [False, True]
    assert delays(sent_once(), LOST, budget=budget) == [0.0]
    assert delays(sent_once(5), FULL, budget=budget) == [FIRST_BACKOFF]
    for _ in range(1000):
        budget.add_request()
    assert [budget.try_spend() for _ in range(3)] == [True, True, False]


def test_backoff_doubles_and_has_jitter() -> None:
    assert [backoff(retry, 1.0) for retry in (1, 2, 3, 50)] == [0.05, 0.1, 0.2, LAST_BACKOFF]
    assert backoff(3, 0.0) == 0.1


def test_the_next_request_resumes_under_another_request_id() -> None:
    made = sent_once(2, prompt_logprobs=3, logprobs=1)
    request = made.next_request([8, 9])
    assert (request.request_id, list(request.resumed_token_ids)) == ("r.2", [8, 9])
    assert (request.sampling_params.key, request.sampling_params.logprobs) == (7, 1)
    assert request.sampling_params.prompt_logprobs is None
    assert sent_once(prompt_logprobs=3).next_request([]).sampling_params.prompt_logprobs == 3
    assert RequestAttempts(made.request, RoutingHints()).next_request([]) is made.request


@pytest.mark.parametrize(
    ("num_tokens", "incompatible"), [(0, ["vocabulary", "tokenizer"]), (5, ["vocabulary", "tokenizer", "weights"])]
)
def test_engines_with_another_tokenizer_or_weights_are_incompatible(num_tokens: int, incompatible: list[str]) -> None:
    others = [
        engine("same", max_model_len=50),
        engine("vocabulary", vocab_size=11),
        engine("tokenizer", tokenizer_digest="e"),
        engine("weights", model="/other"),
        engine("block size", block_size=32),
        cast(EngineClient, SimpleNamespace(address="not connected", hello=None)),
    ]
    assert sent_once(num_tokens).incompatible(others) == incompatible


def test_engines_without_grammars_are_incompatible_with_a_request_that_has_one() -> None:
    engines = [engine("without"), engine("with", grammars=True)]
    params = SamplingParams(grammar=Grammar(text='start: "a"'))
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params)
    assert RequestAttempts(request, RoutingHints()).incompatible(engines) == ["without"]
    plain = replace(request, sampling_params=SamplingParams())
    assert RequestAttempts(plain, RoutingHints()).incompatible(engines) == []


def test_engines_without_the_pooling_task_are_incompatible_with_a_request_that_has_it() -> None:
    embeds = engine("embeds", pooling_tasks=(PoolingTask.EMBED,), pooling_only=True)
    engines = [engine("generates"), embeds, engine("classifies", pooling_tasks=(PoolingTask.CLASSIFY,))]
    params = PoolingParams(task=PoolingTask.EMBED)
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(), pooling_params=params
    )
    assert RequestAttempts(request, RoutingHints()).incompatible(engines) == ["generates", "classifies"]
    plain = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
    assert RequestAttempts(plain, RoutingHints()).incompatible(engines) == ["embeds"]
