"""Warm-up: the first steps, before anybody waits for them. What they take tells how long a step may take at most."""

import time

from proa_engine.core.engine_core import EngineCore
from proa_engine.core.sampling_params import SamplingParams
from proa_engine.core.types import EngineCoreRequest

MAX_PROMPT_TOKENS = 512
NUM_OUTPUT_TOKENS = 4


def warm_up(core: EngineCore, *, max_num_batched_tokens: int, max_model_len: int) -> float:
    """Run one prompt through prefill and decode; seconds that a step with a full token budget would take.

    The prompt is shorter than the budget, so that starting stays quick on a slow machine, and its step is scaled up.
    Its cache salt keeps it out of everybody's prefix cache.
    """
    num_tokens = max(1, min(MAX_PROMPT_TOKENS, max_num_batched_tokens, max_model_len - NUM_OUTPUT_TOKENS))
    core.submit(
        EngineCoreRequest(
            request_id="warm-up",
            prompt_token_ids=[0] * num_tokens,
            sampling_params=SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, key=0),
            cache_salt="warm-up",
            arrival_time=time.time(),
        )
    )
    largest = 0.0
    while core.has_unfinished_requests():
        started = time.monotonic()
        core.step()
        largest = max(largest, time.monotonic() - started)
    return largest * max_num_batched_tokens / num_tokens
