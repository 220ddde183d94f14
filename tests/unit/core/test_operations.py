"""Operators' calls: sleep and wake up with requests in every state, and the prefix cache."""

from concurrent.futures import Future

import pytest

from proa.contract import FinishReason
from proa_engine.core.operations import Operation, ResetPrefixCache, Sleep, WakeUp
from support.core import CoreRun, make_request
from support.fake_grammar import fake_grammar

ASLEEP = ("sleep", 1)
AWAKE = ("wake up", 0)


def operate(run: CoreRun, operation: Operation[None]) -> "Future[None]":
    done = run.core.operate(operation)
    while run.core.has_work():
        run.step()
    return done


def calls(run: CoreRun) -> list[tuple[str, int]]:
    return [call for call in run.executor.log if call[0] in ("sleep", "wake up")]


@pytest.mark.parametrize("level", [1, 2])
def test_an_idle_engine_sleeps_at_once_and_generates_the_same_after_it_woke_up(level: int) -> None:
    run = CoreRun()
    run.submit(make_request("a", range(9)))
    run.finish()
    assert operate(run, Sleep(level)).done()  # type: ignore[arg-type]
    assert run.core.stats().sleep_level == level
    assert operate(run, WakeUp()).done()
    assert run.core.stats().sleep_level == 0
    assert calls(run) == [("sleep", level), AWAKE]
    run.submit(make_request("b", range(9)))
    run.finish()
    assert run.tokens("b") == run.tokens("a")
    assert run.last("b").num_cached_tokens == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_sleep_aborts_running_and_waiting_requests(async_scheduling: bool) -> None:
    run = CoreRun(async_scheduling=async_scheduling, max_num_seqs=1)
    run.submit(make_request("a", max_tokens=50), make_request("b"))
    run.steps(3)
    assert operate(run, Sleep(1)).done()
    assert [run.finish_reason(name) for name in "ab"] == [FinishReason.ABORT] * 2
    assert calls(run) == [ASLEEP]


def test_sleep_aborts_a_request_that_waits_for_its_grammar() -> None:
    run = CoreRun()
    run.submit(make_request("a", grammar=fake_grammar()))
    run.step()
    assert operate(run, Sleep(1)).done()
    assert run.finish_reason() is FinishReason.ABORT
    run.grammars.compile_all()
    operate(run, WakeUp())
    run.finish()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_sleep_waits_for_all_requests_and_rejects_new_ones(async_scheduling: bool) -> None:
    run = CoreRun(async_scheduling=async_scheduling, max_num_seqs=1)
    requests = [make_request("a", max_tokens=9), make_request("b")]
    run.submit(*requests)
    run.steps(2)
    done = run.core.operate(Sleep(1, wait=True))
    run.submit(make_request("late"))
    run.step()
    assert not done.done()
    assert run.core.stats().sleep_level == 1
    run.finish()
    assert done.done()
    run.assert_complete(requests)
    assert [(each.request_id, each.code) for each in run.rejections] == [("late", "unavailable")]


def test_a_waiting_sleep_ends_when_a_later_one_aborts() -> None:
    run = CoreRun()
    run.submit(make_request("a", max_tokens=50))
    run.step()
    waiting = run.core.operate(Sleep(1, wait=True))
    run.step()
    assert operate(run, Sleep(2)).done()
    assert waiting.done()
    assert calls(run) == [ASLEEP]


def test_an_engine_that_sleeps_stays_at_its_level() -> None:
    run = CoreRun()
    operate(run, Sleep(1))
    assert operate(run, Sleep(2)).done()
    assert calls(run) == [ASLEEP]
    assert run.core.stats().sleep_level == 1


def test_waking_an_engine_that_is_awake_has_no_effect() -> None:
    run = CoreRun()
    assert operate(run, WakeUp()).done()
    assert calls(run) == []
    run.submit(make_request("a"))
    run.finish()
    run.assert_complete([make_request("a")])


def test_waking_cancels_a_sleep_that_waits() -> None:
    run = CoreRun()
    request = make_request("a", max_tokens=9)
    run.submit(request)
    run.step()
    asleep = run.core.operate(Sleep(1, wait=True))
    run.core.operate(WakeUp())
    run.submit(make_request("b"))
    run.finish()
    assert asleep.done()
    assert calls(run) == []
    run.assert_complete([request, make_request("b")])


def test_messages_take_effect_in_the_order_they_were_sent() -> None:
    run = CoreRun()
    run.submit(make_request("before"))
    run.core.operate(Sleep(1))
    run.submit(make_request("asleep"))
    run.core.operate(WakeUp())
    run.submit(make_request("after"))
    run.finish()
    assert run.finish_reason("before") is FinishReason.ABORT
    assert [rejection.request_id for rejection in run.rejections] == ["asleep"]
    run.assert_complete([make_request("after")])


def test_the_sleep_level_is_sent_when_it_changes() -> None:
    run = CoreRun()
    for operation, level in ((Sleep(1), 1), (WakeUp(), 0)):
        run.core.operate(operation)
        outputs = run.core.step()
        assert outputs is not None
        assert outputs.sleep_level == level
    assert run.core.step() is None


def test_subscribers_learn_that_a_sleeping_engine_has_no_blocks() -> None:
    run = CoreRun()
    run.core.follow_kv_events()
    run.submit(make_request("a", range(9)))
    run.finish()
    run.kv_events.clear()
    operate(run, Sleep(1))
    assert [(batch.changes.is_snapshot, len(batch.changes)) for batch in run.kv_events] == [(True, 0)]


def test_a_failed_wake_up_fails_the_engine() -> None:
    run = CoreRun()
    operate(run, Sleep(1))

    def fail() -> None:
        raise RuntimeError("out of memory")

    run.executor.wake_up = fail  # type: ignore[method-assign]
    run.core.operate(WakeUp())
    with pytest.raises(RuntimeError, match="out of memory"):
        run.step()


def test_a_caller_that_stops_waiting_does_not_cancel_the_operation() -> None:
    run = CoreRun()
    done = run.core.operate(ResetPrefixCache())
    assert not done.cancel()
    run.step()
    assert done.done()
