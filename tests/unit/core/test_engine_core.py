"""EngineCore: inbox, outputs, errors and host time per step."""

import threading
import time

import pytest

from proa.contract import EventType, FinishReason
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.types import ModelRunnerOutput, SchedulerOutput
from support.core import Clock, CoreRun, hash_block, make_request
from support.fake_executor import FakeFuture


def test_step_without_work_returns_none() -> None:
    run = CoreRun()
    assert not run.core.has_unfinished_requests()
    assert run.core.step() is None
    assert not run.executor.plans


def test_a_submitted_request_is_unfinished_at_once() -> None:
    run = CoreRun()
    run.submit(make_request())
    assert run.core.has_unfinished_requests()
    run.finish()
    assert not run.core.has_unfinished_requests()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_abort_that_arrives_during_a_step_is_applied_before_its_outputs_are_built(async_scheduling: bool) -> None:
    run = CoreRun(async_scheduling=async_scheduling)
    run.submit(make_request("a", max_tokens=20), make_request("b", max_tokens=6))
    run.steps(2)
    received = len(run.tokens("a"))
    run.executor.while_waiting = lambda: run.core.abort(["a"])
    run.step()
    run.executor.while_waiting = None
    assert run.finish_reason("a") is FinishReason.ABORT
    assert len(run.tokens("a")) == received
    run.finish()
    run.assert_complete([make_request("b", max_tokens=6)])


def test_an_aborted_requests_memory_is_free_when_the_step_ends() -> None:
    run = CoreRun()
    run.submit(make_request("a", range(20)))
    run.steps(2)
    assert run.core.stats().kv_cache_usage > 0
    run.core.abort(["a"])
    run.step()
    assert run.core.stats().kv_cache_usage == 0


def test_a_request_aborted_before_it_ran_never_reaches_the_workers() -> None:
    run = CoreRun(max_num_seqs=1)
    run.submit(make_request("a"), make_request("b"))
    run.step()
    run.core.abort(["b"])
    run.finish()
    assert all("b" not in batch for batch in run.batches())
    assert run.finish_reason("b") is FinishReason.ABORT
    assert run.event_types("b") == [EventType.QUEUED, EventType.FINISHED]


def test_a_request_aborted_right_after_it_was_submitted_ends_without_a_step() -> None:
    run = CoreRun()
    run.submit(make_request("a"))
    run.core.abort(["a", "a"])
    run.finish()
    assert not run.executor.plans
    assert [output.finish_reason for output in run.outputs["a"]] == [FinishReason.ABORT]


def test_aborting_unknown_and_finished_ids_is_ignored() -> None:
    run = CoreRun()
    run.submit(make_request("a", max_tokens=1))
    run.finish()
    run.core.abort(["a", "unknown"])
    run.finish()
    assert run.finish_reason("a") is FinishReason.LENGTH


def test_an_id_in_use_is_rejected_and_the_first_request_continues() -> None:
    run = CoreRun()
    run.submit(make_request("a", max_tokens=3), make_request("a", [9], client_index=7))
    run.finish()
    (rejection,) = run.rejections
    assert (rejection.request_id, rejection.client_index, rejection.code) == ("a", 7, "already_exists")
    run.assert_complete([make_request("a", max_tokens=3)])


def test_an_id_may_be_used_again_after_its_request_finished() -> None:
    run = CoreRun()
    for _ in range(2):
        run.submit(make_request("a", max_tokens=2))
        run.finish()
    assert not run.rejections
    assert len(run.tokens("a")) == 4


def test_outputs_are_deltas_and_counts_are_totals() -> None:
    run = CoreRun()
    run.submit(make_request("a", range(5), max_tokens=3, client_index=4))
    run.finish()
    outputs = run.outputs["a"]
    assert [len(output.new_token_ids) for output in outputs] == [1, 1, 1]
    assert [output.num_output_tokens for output in outputs] == [None, None, 3]  # as on the wire
    assert {(output.num_prompt_tokens, output.client_index) for output in (outputs[0], outputs[2])} == {(5, 4)}
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]


def test_events_are_sent_once_with_increasing_times() -> None:
    run = CoreRun(clock=Clock())
    run.submit(make_request("a", max_tokens=3))
    run.finish()
    assert run.event_types("a") == [EventType.QUEUED, EventType.SCHEDULED, EventType.FIRST_TOKEN, EventType.FINISHED]
    times = [event.timestamp for event in run.events("a")]
    assert times == sorted(times)
    assert [len(output.events) for output in run.outputs["a"]] == [3, 0, 1]


def test_steps_are_numbered_like_scheduler_outputs() -> None:
    run = CoreRun(async_scheduling=False)
    run.submit(make_request("a", max_tokens=3))
    steps = []
    while run.core.has_unfinished_requests():
        outputs = run.core.step()
        if outputs is not None:
            steps.append(outputs.step)
            assert run.core.stats().num_running_reqs <= 1
    assert steps == [1, 2, 3]


def test_step_raises_what_the_executor_raises_and_clears_step_started_at() -> None:
    run = CoreRun()
    run.executor.fail_at = 2
    run.submit(make_request("a"))
    with pytest.raises(RuntimeError, match="step 2 failed"):
        run.steps(5)
    assert run.core.step_started_at is None


def test_step_started_at_is_set_during_a_step() -> None:
    run = CoreRun()
    seen: list[float | None] = []
    run.executor.while_waiting = lambda: seen.append(run.core.step_started_at)
    before = time.monotonic()
    run.submit(make_request("a"))
    run.finish()
    assert run.core.step_started_at is None
    assert all(started is not None and before <= started <= time.monotonic() for started in seen)


def test_waiting_ends_when_a_request_comes_from_another_thread() -> None:
    run = CoreRun()
    thread = threading.Timer(0.05, run.submit, [make_request("a")])
    thread.start()
    run.core.wait_for_work(timeout=30)
    thread.join()
    assert run.core.has_unfinished_requests()
    run.finish()
    run.assert_complete([make_request("a")])


def test_waiting_ends_by_wake_and_by_timeout() -> None:
    run = CoreRun()
    run.core.wake()
    run.core.wait_for_work(timeout=30)
    assert run.core.step() is None
    run.core.wait_for_work(timeout=0.01)
    assert not run.core.has_unfinished_requests()


def test_a_rejection_that_ended_a_wait_is_returned() -> None:
    run = CoreRun()
    run.submit(make_request("a", []))
    run.core.wait_for_work(timeout=30)
    assert run.core.has_unfinished_requests()
    run.finish()
    assert [rejection.code for rejection in run.rejections] == ["invalid_argument"]


def test_waiting_uses_no_cpu() -> None:
    run = CoreRun()
    used = time.thread_time()
    run.core.wait_for_work(timeout=0.3)
    assert time.thread_time() - used < 0.1


def test_no_wait_while_there_is_work() -> None:
    run = CoreRun()
    run.submit(make_request("a", max_tokens=20))
    run.step()
    started = time.monotonic()
    run.core.wait_for_work(timeout=30)
    assert time.monotonic() - started < 10


def test_requests_and_aborts_from_many_threads() -> None:
    run = CoreRun()
    requests = [make_request(f"r{index}", [index, 1], max_tokens=5) for index in range(40)]
    aborted = {f"r{index}" for index in range(0, 40, 8)}

    def client(share: int) -> None:
        for request in requests[share::4]:
            run.core.submit(request)
            if request.request_id in aborted:
                run.core.abort([request.request_id])

    threads = [threading.Thread(target=client, args=[share]) for share in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or run.core.has_unfinished_requests():
        run.core.wait_for_work(timeout=0.01)
        run.step()
    run.finish()
    assert run.outputs.keys() == {request.request_id for request in requests}
    run.assert_complete(request for request in requests if request.request_id not in aborted)


class InstantExecutor:
    """Answers every row with the same token, at no cost worth measuring."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._plan = scheduler_output

    def draft_tokens(self) -> dict[int, list[int]]:
        return {}

    def sample_tokens(self, masks: GrammarMasks | None = None) -> FakeFuture:
        tokens = [7] * len(self._plan.num_scheduled_tokens)
        return FakeFuture(ModelRunnerOutput(plain_token_ids=tokens), lambda: None)

    def sleep(self, level: int) -> None:
        raise NotImplementedError

    def wake_up(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        pass


def test_a_step_of_256_decodes_costs_the_host_little() -> None:
    manager = KVCacheManager(CacheGroups(num_blocks=4096, block_size=16), hash_block=hash_block)
    core = EngineCore(Scheduler(SchedulerConfig(max_model_len=1000), manager), InstantExecutor())
    for index in range(256):
        core.submit(make_request(f"r{index}", [index], max_tokens=100))
    costs = []
    for _ in range(50):
        started = time.thread_time()
        outputs = core.step()
        costs.append(time.thread_time() - started)
    assert outputs is not None
    assert len(outputs.plain.request_ids) == 256
    assert min(costs) < 0.004  # seconds; 0.0007 on an idle core
