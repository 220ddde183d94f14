"""Tokens that a grammar forces: appended without being sampled, and computed in one chunk."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from proa.contract import FinishReason, RepetitionDetectionParams
from support.core import CoreRun, make_request
from support.core_traffic import MAX_MODEL_LEN, Traffic, random_schedule
from support.fake_grammar import fake_grammar, generate_constrained
from support.thorough import seeds


def run_one(*, async_scheduling: bool = True, compute_forced_tokens: bool = True, **params: Any) -> CoreRun:
    """A request whose grammar leaves a choice for 2 tokens, then none for 6, and so on."""
    run = CoreRun(async_scheduling=async_scheduling, compute_forced_tokens=compute_forced_tokens)
    request = make_request(**{"grammar": fake_grammar(run=6), "max_tokens": 24, **params})
    run.submit(request)
    run.finish()
    assert (run.tokens(), run.finish_reason()) == generate_constrained(request, run.eos_token_ids, run.max_model_len)
    return run


def random_acceptance(seed: int) -> Callable[[int], int]:
    rng = random.Random(seed)
    return lambda num_drafts: rng.randint(0, num_drafts)


def num_steps(run: CoreRun) -> int:
    return len(list(filter(None, run.batches())))


def num_forced(run: CoreRun) -> int:
    return run.core.counters().num_forced_tokens


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_forced_tokens_are_computed_in_fewer_steps(async_scheduling: bool) -> None:
    run = run_one(async_scheduling=async_scheduling)
    plain = run_one(async_scheduling=async_scheduling, compute_forced_tokens=False)
    assert num_steps(run) < 0.7 * num_steps(plain)
    assert num_forced(run) > 10
    assert num_forced(plain) == 0


def test_forced_tokens_are_one_chunk_with_the_token_before_them() -> None:
    run = run_one(async_scheduling=False, max_tokens=9)
    assert run.batches() == [{"a": 3}, {"a": 1}, {"a": 7}]
    assert [len(output.new_token_ids) for output in run.outputs["a"]] == [1, 7, 1]
    (known,) = (known for plan in run.executor.plans for known in plan.cached_requests if known.new_token_ids)
    assert (known.num_computed_tokens, known.new_token_ids) == (4, run.tokens()[1:8])


def test_a_step_in_flight_samples_the_first_forced_token_early_and_without_a_mask() -> None:
    run = run_one(max_tokens=9)
    assert run.batches() == [{"a": 3}, {"a": 1}, {"a": 1}, {"a": 6}]
    assert [len(output.new_token_ids) for output in run.outputs["a"]] == [1, 7, 1]
    assert [plan.grammar_rows for plan in run.executor.plans[:4]] == [[0]] * 4
    assert len(run.grammars.fills) == 3


def test_the_token_in_flight_is_sampled_where_it_alone_is_forced() -> None:
    run = run_one(grammar=fake_grammar(run=1), max_tokens=24)
    assert num_forced(run) == 0
    assert num_forced(run_one(grammar=fake_grammar(run=1), async_scheduling=False)) == 3


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_max_tokens_ends_an_output_among_forced_tokens(max_tokens: int) -> None:
    run = run_one(max_tokens=max_tokens)
    assert run.finish_reason() is FinishReason.LENGTH
    assert run.last().num_output_tokens == max_tokens


@pytest.mark.parametrize("length", range(1, 20))
def test_a_grammar_ends_an_output_among_forced_tokens(length: int) -> None:
    run = run_one(grammar=fake_grammar(run=6, length=length))
    assert run.finish_reason() is FinishReason.COMPLETE
    assert run.last().num_output_tokens == length


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_forced_stop_token_ends_an_output(async_scheduling: bool) -> None:
    tokens = run_one().tokens()
    run = run_one(stop_token_ids=[tokens[12]], async_scheduling=async_scheduling)
    assert run.finish_reason() is FinishReason.STOP
    assert run.last().stop_reason == tokens[12]
    assert run.tokens() == tokens[: tokens.index(tokens[12]) + 1]


def test_resumed_tokens_may_end_among_forced_tokens() -> None:
    tokens = run_one().tokens()
    for count in range(1, 20):
        resumed = run_one_resumed(tokens[:count])
        assert resumed.tokens() == tokens[count:]
        assert resumed.last().num_output_tokens == len(tokens)


def run_one_resumed(resumed: list[int]) -> CoreRun:
    run = CoreRun()
    run.submit(make_request(grammar=fake_grammar(run=6), max_tokens=24, resumed=resumed))
    run.finish()
    return run


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 0},
        {"min_tokens": 3},
        {"logit_bias": {1: 1.0}},
        {"bad_words_token_ids": ((1, 2),)},
        {"repetition_detection": RepetitionDetectionParams()},
    ],
)
def test_tokens_with_log_probabilities_or_rules_are_all_sampled(params: dict[str, Any]) -> None:
    run = run_one(**params)
    assert num_forced(run) == 0
    assert len(run.grammars.fills) == len(run.tokens())


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_right", [0, 1])
def test_forced_tokens_are_computed_in_fewer_steps_beside_drafts(num_right: int, async_scheduling: bool) -> None:
    runs = [
        CoreRun(
            num_speculative_tokens=3,
            accept=partial(min, num_right),
            async_scheduling=async_scheduling,
            compute_forced_tokens=computes,
        )
        for computes in (True, False)
    ]
    request = make_request(grammar=fake_grammar(run=6), max_tokens=30)
    for run in runs:
        run.submit(request)
        run.finish()
        run.assert_complete([request])
    assert num_steps(runs[0]) < num_steps(runs[1])
    assert num_forced(runs[0]) > 10


def test_the_step_behind_forced_tokens_computes_those_that_the_row_in_flight_does_not() -> None:
    for num_right in (0, 1, 2):
        run = CoreRun(num_speculative_tokens=2, accept=partial(min, num_right))
        run.submit(make_request(grammar=fake_grammar(run=6), max_tokens=9))
        run.finish()
        (known,) = (known for plan in run.executor.plans for known in plan.cached_requests if known.new_token_ids)
        end = known.num_computed_tokens + len(known.new_token_ids)
        assert known.new_token_ids == run.tokens()[known.num_computed_tokens - 3 : end - 3]
        assert end == 3 + 8, "all but the last token"


def test_a_run_longer_than_the_budget_is_computed_in_several_chunks() -> None:
    run = CoreRun(max_num_batched_tokens=3, async_scheduling=False)
    request = make_request(grammar=fake_grammar(run=7), max_tokens=30)
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert sum(batch == {"a": 3} for batch in run.batches()) > 6


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_state_slots", [0, 12])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("seed", seeds(3, thorough=40))
def test_random_traffic_gets_the_same_tokens_whether_forced_tokens_are_sampled_or_not(
    seed: int, num_drafts: int, num_state_slots: int, async_scheduling: bool
) -> None:
    for compute_forced_tokens in (True, False):
        rng = random.Random(seed)
        run = CoreRun(
            num_blocks=rng.choice([40, 60]),
            windows=rng.choice([(), (9,)]),
            num_state_slots=num_state_slots,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=5 if num_state_slots else rng.choice([3, 8]),
            max_num_batched_tokens=rng.choice([3, 16, 64]),
            policy=rng.choice(["fcfs", "priority"]),
            async_scheduling=async_scheduling,
            compute_forced_tokens=compute_forced_tokens,
            num_speculative_tokens=num_drafts,
            draft_schedule=random_schedule(seed, num_drafts),
            accept=random_acceptance(seed) if num_drafts else None,
        )
        assert run.groups.capacity >= MAX_MODEL_LEN
        traffic = Traffic(run, rng, num_requests=120, abort_share=0.05, grammar_share=1.0)
        traffic.drive()
        for request_id in run.outputs:
            traffic.check(traffic.requests[request_id])
        assert (num_forced(run) > 0) is compute_forced_tokens
