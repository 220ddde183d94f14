"""Requests that wait for their grammars: they are no work, keep their place, and may be aborted or rejected."""

import threading
import time
from typing import Any

import pytest

from proa.contract import EventType, FinishReason, Grammar
from support.core import CoreRun, make_request
from support.fake_grammar import fake_grammar

GRAMMAR = fake_grammar(length=4)
REQUEST = make_request("a", grammar=GRAMMAR)


def waiting_run(**config: Any) -> CoreRun:
    """A run with one request, which waits for its grammar."""
    run = CoreRun(**config)
    run.submit(REQUEST)
    run.step()
    return run


def test_a_known_grammar_starts_at_once() -> None:
    run = CoreRun()
    run.grammars.known = {GRAMMAR.text}
    run.submit(REQUEST)
    run.step()
    assert run.executor.plans[0].grammar_rows == [0]


def test_a_request_that_waits_for_its_grammar_is_unfinished_and_counted_but_no_work() -> None:
    run = waiting_run()
    assert run.core.has_unfinished_requests()
    assert not run.core.has_work()
    assert run.core.step() is None
    assert not run.executor.plans
    stats = run.core.stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 1)


def test_waiting_for_a_grammar_uses_no_cpu() -> None:
    run = waiting_run()
    used, started = time.thread_time(), time.monotonic()
    run.core.wait_for_work(timeout=0.3)
    assert time.monotonic() - started >= 0.3
    assert time.thread_time() - used < 0.1


def test_a_grammar_that_is_ready_ends_the_wait() -> None:
    run = waiting_run()
    thread = threading.Timer(0.05, run.grammars.compile)
    thread.start()
    run.core.wait_for_work(timeout=30)
    thread.join()
    assert run.core.has_work()
    run.finish()
    run.assert_complete([REQUEST])
    assert run.event_types()[:2] == [EventType.QUEUED, EventType.SCHEDULED]


def test_workers_are_notified_of_finished_requests_while_others_wait_for_their_grammars() -> None:
    run = waiting_run()
    run.submit(make_request("b", max_tokens=2))
    while run.core.has_work():
        run.step()
    assert run.finish_reason("b") is FinishReason.LENGTH
    assert not run.executor.rows
    assert run.core.has_unfinished_requests()


def test_a_request_joins_the_queue_in_the_order_of_arrival() -> None:
    run = waiting_run(max_num_seqs=1)
    run.submit(make_request("b", max_tokens=4), make_request("c"))
    run.steps(2)
    run.grammars.compile()
    run.finish()
    starts = {request_id: run.events(request_id)[1].timestamp for request_id in "abc"}
    assert sorted(starts, key=lambda request_id: starts[request_id]) == ["b", "a", "c"]


def test_an_abort_finds_a_request_that_waits_for_its_grammar() -> None:
    run = waiting_run()
    run.core.abort(["a"])
    run.step()
    assert run.finish_reason() is FinishReason.ABORT
    assert run.event_types() == [EventType.QUEUED, EventType.FINISHED]
    assert not run.core.has_unfinished_requests()
    run.grammars.compile()
    run.finish()
    assert len(run.outputs["a"]) == 1
    assert not run.executor.plans


@pytest.mark.parametrize("text", [GRAMMAR.text, "invalid"])
def test_a_grammar_of_an_aborted_request_does_not_reach_a_new_one_with_its_id(text: str) -> None:
    run = CoreRun()
    run.submit(make_request("a", grammar=Grammar(text=text)))
    run.core.abort(["a"])
    second = make_request("a", grammar=fake_grammar(2, 6))
    run.submit(second)
    run.step()
    run.outputs.clear()
    run.grammars.compile()  # the first request's
    run.step()
    assert not run.executor.plans
    run.finish()
    run.assert_complete([second])
    assert not run.rejections


def test_an_id_that_waits_for_its_grammar_is_in_use() -> None:
    run = waiting_run()
    run.submit(make_request("a"))
    run.finish()
    assert [rejection.code for rejection in run.rejections] == ["already_exists"]
    run.assert_complete([REQUEST])


@pytest.mark.parametrize(("text", "code"), [("invalid", "invalid_argument"), ("busy", "resource_exhausted")])
def test_a_request_whose_grammar_cannot_be_compiled_is_rejected(text: str, code: str) -> None:
    run = CoreRun()
    run.submit(make_request("a", grammar=Grammar(text=text), client_index=3), make_request("b"))
    run.finish()
    (rejection,) = run.rejections
    assert (rejection.request_id, rejection.client_index, rejection.code) == ("a", 3, code)
    assert rejection.message == f"{text} text"
    assert "a" not in run.outputs
    run.assert_complete([make_request("b")])


def test_requests_that_wait_for_their_grammars_fill_the_queue() -> None:
    run = waiting_run(max_waiting_requests=1)
    run.submit(make_request("b"))
    run.finish()
    assert [rejection.request_id for rejection in run.rejections] == ["b"]
    run.assert_complete([REQUEST])


@pytest.mark.parametrize("is_known", [True, False])
def test_resumed_tokens_that_complete_the_grammar_end_the_request_without_a_step(is_known: bool) -> None:
    run = CoreRun()
    run.grammars.known = {GRAMMAR.text} if is_known else set()
    run.submit(make_request("a", grammar=GRAMMAR, resumed=run.expected(REQUEST)))
    run.finish()
    (output,) = run.outputs["a"]
    assert (output.finish_reason, output.new_token_ids, output.num_output_tokens) == (FinishReason.COMPLETE, (), 4)
    assert not run.executor.plans


@pytest.mark.parametrize("num_resumed", [1, 2, 3])
def test_a_resumed_output_continues_within_its_grammar(num_resumed: int) -> None:
    run = CoreRun()
    resumed = make_request("a", grammar=GRAMMAR, resumed=run.expected(REQUEST)[:num_resumed])
    run.submit(resumed)
    run.finish()
    run.assert_complete([resumed])
    assert run.finish_reason() is FinishReason.COMPLETE
