"""Plans that the worker makes up for itself: to warm up, and to find how much memory the largest step takes."""

from proa_engine.core.sampling_params import SamplingParams
from proa_engine.core.types import CachedRequestData, NewRequestData, SchedulerOutput


def prefill_plan(num_tokens: int, *, max_model_len: int, block_size: int, num_blocks: int) -> SchedulerOutput:
    """A step of that many prompt tokens, in as few requests as the context allows.

    All requests share the blocks, over and over: what they write is never read again.
    """
    lengths = [max_model_len] * (num_tokens // max_model_len)
    if num_tokens % max_model_len:
        lengths.append(num_tokens % max_model_len)
    requests = [
        NewRequestData(
            request_id=f"warm-up-{index}",
            token_ids=[0] * length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=[block % num_blocks for block in range(-(-(length + 1) // block_size))],
            sampling_params=SamplingParams(temperature=0.0),
        )
        for index, length in enumerate(lengths)
    ]
    return _plan(new=requests, scheduled={request.request_id: len(request.token_ids) for request in requests})


def decode_plan(request_ids: list[str], num_computed_tokens: int) -> SchedulerOutput:
    cached = [
        CachedRequestData(request_id=request_id, num_computed_tokens=num_computed_tokens, new_block_ids=[])
        for request_id in request_ids
    ]
    return _plan(cached=cached, scheduled=dict.fromkeys(request_ids, 1))


def finish_plan(request_ids: list[str]) -> SchedulerOutput:
    return _plan(finished=request_ids)


def _plan(
    *,
    new: list[NewRequestData] | None = None,
    cached: list[CachedRequestData] | None = None,
    scheduled: dict[str, int] | None = None,
    finished: list[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        new_requests=new or [],
        cached_requests=cached or [],
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
        finished_request_ids=finished or [],
        preempted_request_ids=[],
    )
