"""Request: how it finishes, and its finish reason."""

from typing import Any

import pytest

from proa.contract import FinishReason
from proa_engine.core.request import FINISH_REASONS, Request, RequestStatus
from support.core import make_request

EOS = 0


def running(prompt_length: int = 3, max_num_tokens: int | None = None, resumed: int = 0, **params: Any) -> Request:
    """A request whose tokens are all planned, so that sampled ones may arrive."""
    params = {"ignore_eos": False, "max_tokens": 8, **params}
    made = make_request(prompt=range(10, 10 + prompt_length), resumed=range(50, 50 + resumed), **params)
    limit = prompt_length + params["max_tokens"] if max_num_tokens is None else max_num_tokens
    request = Request(made, order=(0, 0), max_num_tokens=limit, eos_token_ids=frozenset({EOS}))
    request.status = RequestStatus.RUNNING
    request.schedule(request.num_tokens)
    return request


def end_of(request: Request, *token_ids: int) -> tuple[FinishReason | None, int | None, int]:
    """Reason, stop token, and length of the output when all of `token_ids` were sampled, up to the end."""
    for token_id in token_ids:
        if request.append_token(token_id):
            break
        request.schedule(1)
    return request.finish_reason, request.stop_reason, request.num_output_tokens


def test_every_finished_status_and_no_other_has_a_finish_reason() -> None:
    finished = {status for status in RequestStatus if status > RequestStatus.PREEMPTED}
    assert finished == set(FINISH_REASONS)
    assert {status.name for status in finished} == {s.name for s in RequestStatus if s.name.startswith("FINISHED_")}


def test_a_request_is_finished_if_its_status_is_after_preempted() -> None:
    request = running()
    for status in RequestStatus:
        request.status = status
        assert request.is_finished is (status > RequestStatus.PREEMPTED)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (RequestStatus.FINISHED_STOPPED, FinishReason.STOP),
        (RequestStatus.FINISHED_LENGTH_CAPPED, FinishReason.LENGTH),
        (RequestStatus.FINISHED_ABORTED, FinishReason.ABORT),
    ],
)
def test_finish_reasons(status: RequestStatus, reason: FinishReason) -> None:
    assert FINISH_REASONS[status] is reason


def test_end_of_sequence_stops_without_a_stop_reason() -> None:
    assert end_of(running(), 1, EOS, 2) == (FinishReason.STOP, None, 2)


def test_stop_token_is_the_stop_reason() -> None:
    assert end_of(running(stop_token_ids=[7]), 1, 7) == (FinishReason.STOP, 7, 2)


def test_end_of_sequence_that_is_also_a_stop_token_is_the_stop_reason() -> None:
    assert end_of(running(stop_token_ids=[EOS]), EOS) == (FinishReason.STOP, EOS, 1)


def test_max_tokens_finishes_by_length() -> None:
    assert end_of(running(max_tokens=2), 1, 2) == (FinishReason.LENGTH, None, 2)


@pytest.mark.parametrize("last", [EOS, 7])
def test_end_token_that_is_also_the_last_allowed_is_a_stop(last: int) -> None:
    reason, _, length = end_of(running(max_tokens=2, stop_token_ids=[7]), 1, last)
    assert (reason, length) == (FinishReason.STOP, 2)


def test_end_token_at_the_end_of_the_context_is_a_stop() -> None:
    assert end_of(running(prompt_length=3, max_num_tokens=5), 1, EOS) == (FinishReason.STOP, None, 2)


def test_ignored_end_of_sequence_continues() -> None:
    assert end_of(running(ignore_eos=True, max_tokens=3), 1, EOS, 2) == (FinishReason.LENGTH, None, 3)


def test_ignoring_end_of_sequence_does_not_ignore_stop_tokens() -> None:
    assert end_of(running(ignore_eos=True, stop_token_ids=[EOS]), 1, EOS) == (FinishReason.STOP, EOS, 2)


def test_no_end_before_min_tokens() -> None:
    assert end_of(running(min_tokens=3, stop_token_ids=[7]), EOS, 7, 7) == (FinishReason.STOP, 7, 3)


def test_end_token_below_min_tokens_at_the_limit_is_a_length() -> None:
    assert end_of(running(max_num_tokens=4, min_tokens=3), EOS) == (FinishReason.LENGTH, None, 1)


def test_resumed_tokens_count_as_output() -> None:
    assert end_of(running(resumed=2, max_tokens=4), 1, 2) == (FinishReason.LENGTH, None, 4)
    assert end_of(running(resumed=2, max_tokens=4, min_tokens=3), EOS) == (FinishReason.STOP, None, 3)


def test_last_allowed_token_is_never_computed() -> None:
    request = running(max_tokens=2)
    assert request.num_uncomputed_tokens == 1
    request.schedule(1)
    assert request.num_placeholders == 2
    assert request.num_uncomputed_tokens == 0


def test_appending_a_token_that_was_not_scheduled_fails() -> None:
    request = running()
    request.append_token(1)
    with pytest.raises(AssertionError, match="never scheduled"):
        request.append_token(1)
