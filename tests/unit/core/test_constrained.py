"""Requests with a grammar: masks of each step, and how an output ends."""

from typing import Any

import pytest

from proa.contract import EventType, FinishReason
from support.core import CoreRun, make_request
from support.fake_executor import VOCAB_SIZE
from support.fake_grammar import fake_grammar, generate_constrained

EOS = 0


def ended(run: CoreRun, request_id: str = "a") -> tuple[FinishReason | None, int]:
    """The finish reason and the number of output tokens."""
    return run.finish_reason(request_id), len(run.tokens(request_id))


def knowing(*seeds: int, **config: Any) -> CoreRun:
    """A run that knows the endless grammars of these seeds, so that their requests start at once."""
    run = CoreRun(**config)
    run.grammars.known = {fake_grammar(seed).text for seed in seeds}
    return run


def run_one(**params: Any) -> CoreRun:
    run = CoreRun()
    request = make_request(**{"grammar": fake_grammar(), **params})
    run.submit(request)
    run.finish()
    output, reason = generate_constrained(request, run.eos_token_ids, run.max_model_len)
    assert (run.tokens(), run.finish_reason()) == (output, reason)
    return run


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_each_request_gets_the_tokens_that_it_gets_alone(async_scheduling: bool) -> None:
    run = CoreRun(async_scheduling=async_scheduling, num_blocks=20, max_num_batched_tokens=9, clock=None)
    requests = [
        make_request(f"r{index}", range(index, 2 * index + 3), max_tokens=20, grammar=grammar)
        for index, grammar in enumerate([fake_grammar(), None, fake_grammar(2, 9), fake_grammar(3), None] * 2)
    ]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    assert run.core.stats().num_preemptions > 0


def test_the_forward_pass_starts_before_the_last_tokens_are_known_and_the_masks_are_filled_after() -> None:
    run = CoreRun()
    run.submit(make_request(grammar=fake_grammar()))
    run.finish()
    assert run.executor.log[:9] == [
        ("execute", 1),
        ("mask", 1),
        ("execute", 2),
        ("host", 1),
        ("mask", 2),
        ("execute", 3),
        ("host", 2),
        ("mask", 3),
        ("execute", 4),
    ]


def test_only_rows_that_sample_have_a_mask() -> None:
    run = knowing(1, max_num_batched_tokens=4)
    run.submit(make_request("plain", max_tokens=20))
    run.steps(2)
    run.submit(make_request("a", range(9), max_tokens=2, grammar=fake_grammar()))
    run.finish()
    batches = [(plan.num_scheduled_tokens, plan.grammar_rows) for plan in run.executor.plans[2:7]]
    assert batches == [
        ({"plain": 1, "a": 3}, []),
        ({"plain": 1, "a": 3}, []),
        ({"plain": 1, "a": 3}, [1]),
        ({"plain": 1, "a": 1}, [1]),
        ({"plain": 1}, []),
    ]
    assert run.grammars.fills == [[1], [1]]


def test_one_known_token_of_many_is_computed_without_a_mask() -> None:
    run = CoreRun(max_num_batched_tokens=1)
    run.submit(make_request("a", range(3), max_tokens=2, grammar=fake_grammar()))
    run.finish()
    assert [plan.grammar_rows for plan in run.executor.plans[:4]] == [[], [], [0], [0]]
    run.assert_complete([make_request("a", range(3), max_tokens=2, grammar=fake_grammar())])


def test_tokens_in_the_middle_of_an_output_are_plain() -> None:
    run = run_one(max_tokens=8)
    assert sum(len(plain.token_ids) for plain in run.plain) == 6  # neither the first nor the last


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_right_drafts_of_a_constrained_request_are_accepted(async_scheduling: bool) -> None:
    run = knowing(1, num_speculative_tokens=3, accept=lambda num_drafts: num_drafts, async_scheduling=async_scheduling)
    request = make_request("a", max_tokens=13, grammar=fake_grammar())
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert [batch["a"] for batch in run.batches() if "a" in batch][1:] == [4, 4, 4]
    assert run.grammars.fills == [[0]] + 3 * [[0] * 4]


def test_masks_end_behind_the_first_draft_that_the_grammar_refuses() -> None:
    run = knowing(1, num_speculative_tokens=3, accept=lambda num_drafts: 1, compute_forced_tokens=False)
    request = make_request("a", max_tokens=13, grammar=fake_grammar(run=8))  # which allows one token everywhere
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert run.core.counters().drafts.num_accepted_tokens == 6
    assert {len(rows) for rows in run.grammars.fills[1:-1]} == {2}


def test_a_request_that_may_not_speculate_has_no_drafts_under_a_grammar() -> None:
    run = knowing(1, num_speculative_tokens=3, accept=lambda num_drafts: 0)
    requests = [make_request("a", grammar=fake_grammar(), speculative=False), make_request("b")]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    assert all(batch.get("a", 1) == 1 for batch in run.batches()[1:])
    assert any(batch.get("b", 1) > 1 for batch in run.batches()[1:])


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("params", [{}, {"min_tokens": 7}, {"ignore_eos": False}, {"max_tokens": 4}])
def test_a_complete_grammar_ends_the_output_with_its_last_token(logprobs: int | None, params: dict[str, Any]) -> None:
    run = run_one(grammar=fake_grammar(seed=3, length=4), logprobs=logprobs, **params)
    assert ended(run) == (FinishReason.COMPLETE, 4)
    assert run.last().num_output_tokens == 4
    assert run.last().stop_reason is None
    assert len(run.last().new_token_ids) == 1
    assert len(run.last().logprobs) == (logprobs is not None)


def test_a_grammar_of_one_token_ends_with_the_first() -> None:
    run = run_one(grammar=fake_grammar(length=1))
    assert ended(run) == (FinishReason.COMPLETE, 1)
    assert run.event_types()[-2:] == [EventType.FIRST_TOKEN, EventType.FINISHED]


def test_max_tokens_ends_an_output_within_its_grammar() -> None:
    assert ended(run_one(grammar=fake_grammar(length=4), max_tokens=1)) == (FinishReason.LENGTH, 1)
    assert ended(run_one(grammar=fake_grammar(length=4), max_tokens=3)) == (FinishReason.LENGTH, 3)


def test_an_end_of_sequence_that_the_grammar_allows_is_a_stop() -> None:
    runs = [run_one(prompt=[1, seed], grammar=fake_grammar(seed), ignore_eos=False, max_tokens=40) for seed in range(9)]
    stopped = [run for run in runs if run.finish_reason() is FinishReason.STOP]
    assert stopped
    assert all(run.tokens()[-1] == EOS for run in stopped)


def test_an_end_of_sequence_that_completes_the_grammar_is_a_stop_although_it_is_ignored() -> None:
    runs = [run_one(prompt=[1, seed], grammar=fake_grammar(seed), ignore_eos=True, max_tokens=40) for seed in range(9)]
    ends = [run for run in runs if run.tokens()[-1] == EOS]
    assert ends
    assert all(run.finish_reason() is FinishReason.STOP for run in ends)
    assert all(run.last().stop_reason is None for run in ends)


def test_a_stop_token_that_completes_the_grammar_is_a_stop() -> None:
    last = run_one(grammar=fake_grammar(length=3)).tokens()[-1]
    run = run_one(grammar=fake_grammar(length=3), stop_token_ids=[last])
    assert run.finish_reason() is FinishReason.STOP
    assert run.last().stop_reason == last


def test_a_free_output_does_not_end_before_its_grammar_begins() -> None:
    never = fake_grammar(length=1, start_after=[VOCAB_SIZE])  # no token begins it
    run = run_one(grammar=never, ignore_eos=False, max_tokens=100)
    assert ended(run) == (FinishReason.LENGTH, 100)
    assert EOS not in run.tokens()


def test_an_empty_grammar_ends_without_a_step() -> None:
    run = run_one(grammar=fake_grammar(length=0))
    assert ended(run) == (FinishReason.COMPLETE, 0)
    assert run.last().num_output_tokens == 0
    assert run.event_types() == [EventType.QUEUED, EventType.FINISHED]
    assert not run.executor.plans


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_a_refused_token_is_dropped_and_ends_its_request_alone_with_an_error(
    num_tokens: int, async_scheduling: bool
) -> None:
    run = knowing(1, 2, async_scheduling=async_scheduling)
    request = make_request("a", grammar=fake_grammar(), logprobs=0, max_tokens=30)
    others = [make_request("b", grammar=fake_grammar(2)), make_request("c")]
    run.submit(request, *others)
    while len(run.tokens()) < num_tokens:
        run.step()
    run.executor.disobeys.add("a")
    run.finish()
    assert run.finish_reason() is FinishReason.ERROR
    assert run.tokens() == run.expected(request)[: len(run.tokens())]
    number = len(run.tokens()) + 1
    assert f"the output left its grammar: token {run_token(run)}, its number {number}" in run.last().error
    assert run.last().num_output_tokens == len(run.tokens())
    assert not run.last().logprobs
    assert run.event_types().count(EventType.FIRST_TOKEN) == bool(run.tokens())
    run.assert_complete(others)


def run_token(run: CoreRun, request_id: str = "a") -> int:
    """The refused token, as the error says it."""
    return int(run.last(request_id).error.split("token ")[1].split(",")[0])


@pytest.mark.parametrize("fuel", [0, 1, 5])
def test_a_matcher_that_fails_for_a_mask_never_ends_its_output_as_a_stop(fuel: int) -> None:
    for first in range(VOCAB_SIZE):  # the fake model says any token then, an end of sequence too
        run = run_one(prompt=[first, 5], grammar=fake_grammar(fuel=fuel), ignore_eos=False, stop_token_ids=[7, 9])
        if run.finish_reason() is not FinishReason.STOP:  # by the grammar, before it failed
            assert "under its grammar: no fuel is left" in run.last().error
            assert ended(run) == (FinishReason.ERROR, fuel)


def test_a_grammar_is_not_wanted_any_more_once_its_request_is_aborted() -> None:
    run = CoreRun()
    run.submit(make_request("a", grammar=fake_grammar()), make_request("b", grammar=fake_grammar(2)))
    run.core.abort(["a"])
    run.step()
    assert {name: is_wanted() for name, is_wanted in run.grammars.is_wanted.items()} == {"a": False, "b": True}


@pytest.mark.parametrize("others", [[], [make_request("plain", max_tokens=20)]])
def test_a_step_whose_constrained_rows_were_all_aborted_before_its_masks_goes_on_without_masks(others: Any) -> None:
    run = knowing(1, 2)
    run.submit(*others, make_request("a", grammar=fake_grammar()), make_request("b", grammar=fake_grammar(2)))
    run.steps(3)
    num_fills, received = len(run.grammars.fills), len(run.tokens("a"))
    run.executor.while_waiting = lambda: run.core.abort(["a", "b"])
    run.step()
    run.executor.while_waiting = None
    assert run.executor.plans[-1].grammar_rows == [len(others), len(others) + 1]
    assert len(run.grammars.fills) == num_fills
    assert run.finish_reason("a") is run.finish_reason("b") is FinishReason.ABORT
    assert len(run.tokens("a")) == received
    run.finish()
    run.assert_complete(others)


def test_a_block_that_a_step_fills_is_not_cached_for_a_request_that_ended_before_its_masks() -> None:
    run = CoreRun(block_size=2)
    run.submit(make_request("a", range(5), grammar=fake_grammar(length=1)))
    run.finish()
    assert ended(run) == (FinishReason.COMPLETE, 1)


def test_steps_without_constrained_rows_have_no_masks() -> None:
    run = CoreRun()
    run.submit(make_request("a", grammar=fake_grammar()), make_request("b"))
    run.step()  # "a" waits for its grammar
    assert run.executor.plans[0].grammar_rows == []
    run.finish()
    assert ("mask", 1) not in run.executor.log
