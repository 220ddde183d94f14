"""What a sequence does when an engine fails it: how often, when, where and with what it is sent again."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from proa_gateway.engines.attempts import RequestAttempts
from proa_gateway.engines.client import EngineClient
from proa_gateway.engines.retries import FIRST_PAUSE, LAST_PAUSE, MAX_ATTEMPTS, RetryBudget, pause_before
from proa_gateway.errors import EngineLost, EngineUnavailable, GatewayError, Overloaded
from proa_gateway.routing.hints import HashChain, RoutingHints
from proa_gateway.types import EngineRequest, ModelInfo, SamplingParams

LOST, FULL, REFUSED = EngineLost("lost"), Overloaded("full"), EngineUnavailable("not now")


def engine(address: str = "a", **info: Any) -> EngineClient:
    known = {"model_name": "m", "max_model_len": 100, "vocab_size": 10, "tokenizer_digest": "d", "max_num_seqs": 8}
    known |= {"block_hash_version": 1, "max_logprobs": 20, "chain": HashChain(b"/m", 16)}
    made = ModelInfo(**{**known, **info})
    return cast(EngineClient, SimpleNamespace(address=address, hello=SimpleNamespace(model=made)))


def journey(num_tokens: int = 0, **params: Any) -> RequestAttempts:
    """One that was sent once, and has received so many tokens."""
    request = EngineRequest(request_id="r", prompt_token_ids=[1, 2], sampling_params=SamplingParams(key=7, **params))
    made = RequestAttempts(request, RoutingHints())
    made.sent(engine())
    made.progressed(num_tokens, 1.0)
    return made


def pauses(made: RequestAttempts, *errors: GatewayError, budget: RetryBudget | None = None) -> list[float | None]:
    budget = budget or RetryBudget()
    return [made.failed(error, 10.0 + index, budget, 1.0) for index, error in enumerate(errors)]


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_a_lost_engine_is_replaced_at_once_but_not_by_ever_more_that_die_of_the_same_request(num_tokens: int) -> None:
    assert pauses(journey(num_tokens), *[LOST] * MAX_ATTEMPTS) == [0.0] * (MAX_ATTEMPTS - 1) + [None]


def test_each_token_makes_up_for_what_was_before() -> None:
    made = journey(5)
    for num_tokens in range(6, 20):
        assert pauses(made, LOST) == [0.0]
        made.sent(engine(f"e{num_tokens}"))
        made.progressed(num_tokens, 2.0)
        assert (made.failed_at, made.tried) == (None, [f"e{num_tokens}"])


def test_a_rejected_request_without_tokens_is_given_up_after_some_attempts() -> None:
    assert pauses(journey(), *[FULL] * MAX_ATTEMPTS) == [FIRST_PAUSE, 2 * FIRST_PAUSE, None]
    assert pauses(journey(), LOST, REFUSED, FULL) == [0.0, FIRST_PAUSE, None]


def test_a_rejected_request_with_tokens_is_offered_until_its_time_is_over() -> None:
    made = journey(5)
    told = pauses(made, LOST, *[FULL, REFUSED] * 20)
    assert None not in told
    assert told[-1] == LAST_PAUSE
    assert made.failed_at == 10.0
    assert made.loss is LOST


def test_retries_of_rejected_requests_stay_a_share_of_the_traffic() -> None:
    budget = RetryBudget(share=0.25, reserve=2.0)
    assert [pauses(journey(), FULL, budget=budget)[0] is None for _ in range(4)] == [False, False, True, True]
    for _ in range(4):
        budget.earn()
    assert [pauses(journey(), FULL, budget=budget)[0] is None for _ in range(2)] == [False, True]
    assert pauses(journey(), LOST, budget=budget) == [0.0]
    assert pauses(journey(5), FULL, budget=budget) == [FIRST_PAUSE]
    for _ in range(1000):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_pauses_double_and_are_spread() -> None:
    assert [pause_before(retry, 1.0) for retry in (1, 2, 3, 50)] == [0.05, 0.1, 0.2, LAST_PAUSE]
    assert pause_before(3, 0.0) == 0.1


def test_the_next_engine_is_asked_for_the_rest_under_another_name() -> None:
    made = journey(2, prompt_logprobs=3, logprobs=1)
    request = made.next_request([8, 9])
    assert (request.request_id, list(request.resumed_token_ids)) == ("r.2", [8, 9])
    assert (request.sampling_params.key, request.sampling_params.logprobs) == (7, 1)
    assert request.sampling_params.prompt_logprobs is None
    assert journey(prompt_logprobs=3).next_request([]).sampling_params.prompt_logprobs == 3
    assert RequestAttempts(made.request, RoutingHints()).next_request([]) is made.request


@pytest.mark.parametrize(
    ("num_tokens", "unfit"), [(0, ["vocabulary", "tokenizer"]), (5, ["vocabulary", "tokenizer", "weights"])]
)
def test_only_an_engine_that_would_have_said_the_same_goes_on_with_tokens(num_tokens: int, unfit: list[str]) -> None:
    others = [
        engine("same", max_model_len=50),
        engine("vocabulary", vocab_size=11),
        engine("tokenizer", tokenizer_digest="e"),
        engine("weights", chain=HashChain(b"/other", 16)),
        engine("block size", chain=HashChain(b"/m", 32)),
        cast(EngineClient, SimpleNamespace(address="not connected", hello=None)),
    ]
    assert journey(num_tokens).unfit(others) == unfit
