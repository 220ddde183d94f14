"""Pooled requests: they end with values when their whole prompt is computed."""

import pytest

from proa.contract import EventType, FinishReason, PoolingTask
from support.core import CoreRun, make_pooled, make_request

TASKS = list(PoolingTask)
LONG = range(1, 41)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_a_pooled_request_ends_with_its_values_and_no_token(task: PoolingTask, async_scheduling: bool) -> None:
    run = CoreRun(async_scheduling=async_scheduling)
    request = make_pooled(task=task)
    run.submit(request)
    run.finish()
    run.assert_pooled(request)
    assert run.event_types() == [EventType.QUEUED, EventType.SCHEDULED, EventType.FINISHED]


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_in_chunks_has_the_values_of_the_whole_prompt(task: PoolingTask) -> None:
    run = CoreRun(max_num_batched_tokens=16)
    request = make_pooled(prompt=LONG, task=task)
    run.submit(request)
    run.finish()
    run.assert_pooled(request)
    assert [batch["a"] for batch in run.batches()] == [16, 16, 8]


def test_a_last_chunk_of_one_token_samples_nothing() -> None:
    run = CoreRun(max_num_batched_tokens=13)
    request = make_pooled(prompt=LONG, task=PoolingTask.TOKEN_EMBED)
    run.submit(request, make_request("b"))
    run.finish()
    run.assert_pooled(request)
    assert run.batches()[3]["a"] == 1


def test_pooled_and_generating_requests_share_steps() -> None:
    run = CoreRun(num_speculative_tokens=2, accept=lambda num_drafts: num_drafts)
    pooled, generating = make_pooled("a", task=PoolingTask.CLASSIFY), make_request("b")
    run.submit(pooled, generating)
    run.finish()
    run.assert_pooled(pooled)
    run.assert_complete([generating])
    assert run.batches()[0] == {"a": 3, "b": 3}


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_whole_prompts_are_not_cut_and_wait_for_a_step_with_room(async_scheduling: bool) -> None:
    run = CoreRun(max_num_batched_tokens=40, whole_prompts=True, async_scheduling=async_scheduling)
    requests = [make_pooled(str(length), range(length), PoolingTask.TOKEN_EMBED) for length in (30, 20, 5, 40, 1)]
    run.submit(*requests)
    run.finish()
    for request in requests:
        run.assert_pooled(request)
    assert run.batches() == [{"30": 30}, {"20": 20, "5": 5}, {"40": 40}, {"1": 1}]


def test_a_pooled_prompt_may_fill_the_context() -> None:
    run = CoreRun(max_model_len=40)
    request = make_pooled(prompt=LONG)
    run.submit(request, make_request("b", LONG), make_pooled("c", range(41)))
    run.finish()
    run.assert_pooled(request)
    assert [(each.request_id, each.code) for each in run.rejections] == [
        ("b", "invalid_argument"),
        ("c", "invalid_argument"),
    ]


@pytest.mark.parametrize("task", TASKS)
def test_only_values_of_the_last_token_read_the_prefix_cache(task: PoolingTask) -> None:
    run = CoreRun()
    run.submit(make_request("b", LONG, max_tokens=1))
    run.finish()
    request = make_pooled(prompt=LONG, task=task)
    run.submit(request)
    run.finish()
    run.assert_pooled(request)
    reads = task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_LOGPROBS)
    assert run.last().num_cached_tokens == (36 if reads else 0)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_a_preempted_pooled_request_begins_again(task: PoolingTask, async_scheduling: bool) -> None:
    run = CoreRun(
        num_blocks=12, max_num_batched_tokens=8, enable_prefix_caching=False, async_scheduling=async_scheduling
    )
    generating = make_request("b", range(1, 8), max_tokens=30)
    run.submit(generating)
    run.steps(6)
    request = make_pooled(prompt=range(1, 33), task=task)
    run.submit(request)
    run.finish()
    run.assert_pooled(request)
    run.assert_complete([generating])
    assert EventType.PREEMPTED in run.event_types()


def test_an_aborted_pooled_request_has_no_values() -> None:
    run = CoreRun(max_num_batched_tokens=16)
    run.submit(make_pooled(prompt=LONG, task=PoolingTask.TOKEN_EMBED))
    run.steps(2)
    run.core.abort(["a"])
    run.finish()
    assert run.finish_reason() is FinishReason.ABORT
    assert run.last().pooled == b""


def test_a_new_request_with_the_id_of_an_aborted_one_gets_none_of_its_values() -> None:
    run = CoreRun(max_num_batched_tokens=16)
    run.submit(make_pooled(prompt=LONG, task=PoolingTask.TOKEN_EMBED))
    run.steps(2)
    run.core.abort(["a"])
    request = make_pooled(prompt=range(30), task=PoolingTask.TOKEN_EMBED)
    run.submit(request)
    run.finish()
    run.outputs["a"] = run.outputs["a"][1:]
    run.assert_pooled(request)
