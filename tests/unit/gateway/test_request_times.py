"""The times of a request from the events of its engines."""

import pytest

from proa.contract import EventType
from proa_gateway.serving.generation_job import request_times

TIMES = {EventType.QUEUED: 10.0, EventType.SCHEDULED: 10.25, EventType.FIRST_TOKEN: 10.5, EventType.FINISHED: 12.0}


def test_times_are_those_between_events() -> None:
    assert request_times(TIMES, 7) == {
        "queue_time_ms": 250.0,
        "time_to_first_token_ms": 250.0,
        "generation_time_ms": 1500.0,
        "mean_itl_ms": 250.0,
        "tokens_per_second": 4.0,
    }


def test_one_token_has_no_time_between_tokens() -> None:
    assert "mean_itl_ms" not in request_times(TIMES, 1)


@pytest.mark.parametrize("missing", [EventType.SCHEDULED, EventType.FINISHED])
def test_times_of_events_that_did_not_come_are_null(missing: EventType) -> None:
    times = {event: time for event, time in TIMES.items() if event is not missing}
    assert request_times(times, 7)["tokens_per_second"] is None


def test_clocks_of_two_engines_give_no_negative_time() -> None:
    assert request_times({**TIMES, EventType.FINISHED: 1.0}, 7)["generation_time_ms"] == 0.0
