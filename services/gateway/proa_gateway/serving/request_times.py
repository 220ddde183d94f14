"""The times of a request, for its response, as in vLLM."""

from collections.abc import Mapping

from proa.contract import EventType


def request_times(times: Mapping[EventType, float], num_tokens: int) -> dict[str, float | None]:
    """Milliseconds, and tokens a second. `times`: of the engine's events, in seconds. None: an event did not come; an
    engine sends none for the end of an output that the gateway ends, such as at a stop string.

    The queue is the engine's. The first token counts from the first step, so both together are the engine's time to it.
    `tokens_per_second` counts from there too.
    """
    generation = _between(times, EventType.FIRST_TOKEN, EventType.FINISHED)
    inference = _between(times, EventType.SCHEDULED, EventType.FINISHED)
    metrics = {
        "time_to_first_token_ms": _between(times, EventType.SCHEDULED, EventType.FIRST_TOKEN),
        "generation_time_ms": generation,
        "queue_time_ms": _between(times, EventType.QUEUED, EventType.SCHEDULED),
        "tokens_per_second": num_tokens / inference * 1000 if inference else None,
    }
    if generation is not None and num_tokens > 1:
        metrics["mean_itl_ms"] = generation / (num_tokens - 1)
    return metrics


def _between(times: Mapping[EventType, float], start: EventType, end: EventType) -> float | None:
    """Milliseconds. After a failover the events are of different clocks."""
    return max(0.0, times[end] - times[start]) * 1000 if start in times and end in times else None
