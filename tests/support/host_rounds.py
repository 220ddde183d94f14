"""Requests that press a cache which has a host tier, one after the other."""

import random
from typing import Any

from proa.contract import SamplingParams
from support.engine import Engine, Result, request, run
from support.tiny_models import BYTES

NUM_TOKENS = 12
HOST: dict[str, Any] = {"kv_offloading_size": 0.02}


def make_prompts() -> list[list[int]]:
    """Most with one of three common prefixes of several blocks."""
    rows = random.Random(7)
    shared = [rows.choices(range(BYTES), k=length) for length in (150, 120, 97)]
    return [rows.choice(shared) + rows.choices(range(BYTES), k=rows.randint(1, 60)) for _ in range(7)]


PROMPTS = make_prompts()


def rounds(engine: Engine, num_rounds: int = 2) -> list[Result]:
    """One request after the other, so that each evicts what those before it have left on the device."""
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    results: list[Result] = []
    for number in range(num_rounds):
        for index, prompt in enumerate(PROMPTS):
            results += run(engine, [request(f"{number}-{index}", prompt, params)]).values()
    return results
