"""Prompts for engines of one rank and of several, and the comparison of their tokens."""

import random
from typing import Any

from proa.contract import SamplingParams
from proa_engine.core.operations import Operation
from support.engine import Engine, Result, request, run
from support.tiny_models import BYTES

MARGIN = 1e-4
CONFIG: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 48, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
ROWS = random.Random(5)
PROMPTS = [ROWS.choices(range(BYTES), k=ROWS.randint(24, 56)) for _ in range(10)]
TWO = PROMPTS[:2]


def operate(engine: Engine, operation: Operation[None]) -> None:
    done = engine.core.operate(operation)
    while not done.done():
        engine.core.step()


def generate(engine: Engine, name: str, prompts: list[list[int]]) -> list[Result]:
    return list(run(engine, [request(f"{name}-{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]).values())


def assert_equal_where_sure(actual: list[Result], expected: list[Result]) -> None:
    """Greedy tokens are equal up to the first whose two best log probabilities are closer than `MARGIN`."""
    num_sure = 0
    for index, (told, reference) in enumerate(zip(actual, expected, strict=True)):
        margins = [step.top_logprobs[0] - step.top_logprobs[1] for step in reference.logprobs]
        sure = next((step for step, margin in enumerate(margins) if margin < MARGIN), len(margins))
        assert told.token_ids[:sure] == reference.token_ids[:sure], index
        num_sure += sure
    assert num_sure > 0.9 * sum(len(reference.token_ids) for reference in expected)


def assert_equal_after_preemption_and_hits(engine: Engine, expected: list[Result]) -> None:
    """`expected`: the tokens of `PROMPTS`. The engine must preempt requests, and then find prefixes of `TWO`."""
    assert_equal_where_sure(generate(engine, "all", PROMPTS), expected)
    assert engine.core.stats().num_preemptions > 0
    generate(engine, "two", TWO)
    again = generate(engine, "again", TWO)
    assert all(each.num_cached_tokens > 0 for each in again)
    assert_equal_where_sure(again, expected[:2])
