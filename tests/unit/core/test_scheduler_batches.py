"""Scheduler: which requests and how many tokens each step computes."""

import pytest

from proa.contract import EngineCoreRequest, EventType, FinishReason, SamplingParams
from proa_engine.core.operations import ResetPrefixCache
from proa_engine.core.scheduler_config import SchedulerConfig
from support.core import CoreRun, make_request
from support.fake_executor import generate


def request_of(
    request_id: str, length: int, max_tokens: int = 4, *, start: int = 0, priority: int = 0
) -> EngineCoreRequest:
    """A request of `length` prompt tokens that share no block with other `start`s."""
    prompt = [start, *range(1, length)]
    return make_request(request_id, prompt, max_tokens=max_tokens, priority=priority)


def test_late_arrivals_start_and_finished_requests_leave() -> None:
    run = CoreRun(async_scheduling=False)
    run.submit(request_of("a", 3, max_tokens=3))
    run.step()
    run.submit(request_of("b", 5, max_tokens=2))
    run.finish()
    assert run.batches() == [{"a": 3}, {"a": 1, "b": 5}, {"a": 1, "b": 1}]


def test_late_arrivals_start_while_a_step_is_in_flight() -> None:
    run = CoreRun(async_scheduling=True)
    run.submit(request_of("a", 3, max_tokens=4))
    run.step()
    run.submit(request_of("b", 5, max_tokens=2))
    run.finish()
    assert run.batches() == [{"a": 3}, {"a": 1, "b": 5}, {"a": 1, "b": 1}, {"a": 1}]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_chunks_of_prefill_and_decodes_share_steps(async_scheduling: bool) -> None:
    run = CoreRun(max_num_batched_tokens=8, async_scheduling=async_scheduling)
    run.submit(request_of("a", 3, max_tokens=6))
    run.step()
    run.submit(request_of("b", 20, max_tokens=1, start=1))
    run.finish()
    assert run.batches() == [{"a": 3}, {"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6}, {"a": 1}, {"a": 1}]


def test_a_chunk_leaves_one_token_for_each_request_behind_it() -> None:
    run = CoreRun(policy="priority", max_num_batched_tokens=8, async_scheduling=False)
    run.submit(request_of("behind", 3, max_tokens=6))
    run.step()
    run.submit(request_of("long", 20, max_tokens=1, start=1, priority=-1))
    run.finish()
    chunks = [{"behind": 1, "long": 7}, {"behind": 1, "long": 7}, {"behind": 1, "long": 6}]
    assert run.batches()[1:4] == chunks


def test_no_step_exceeds_the_budget_or_the_number_of_requests() -> None:
    run = CoreRun(max_num_batched_tokens=10, max_num_seqs=3)
    run.submit(*(request_of(f"r{index}", 7, start=index) for index in range(9)))
    run.finish()
    assert max(sum(batch.values()) for batch in run.batches()) == 10
    assert max(len(batch) for batch in run.batches()) == 3


def test_a_small_budget_runs_fewer_requests_rather_than_starving_some() -> None:
    run = CoreRun(max_num_batched_tokens=2, max_num_seqs=8)
    run.submit(*(request_of(f"r{index}", 3, start=index) for index in range(5)))
    run.finish()
    assert max(len(batch) for batch in run.batches()) == 2


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_repeated_prompt_computes_only_its_uncached_tokens(async_scheduling: bool) -> None:
    run = CoreRun(async_scheduling=async_scheduling)
    run.submit(request_of("a", 18, max_tokens=1))
    run.finish()
    run.submit(request_of("b", 18, max_tokens=1))
    run.finish()
    assert run.batches() == [{"a": 18}, {"b": 2}]
    assert (run.last("a").num_cached_tokens, run.last("b").num_cached_tokens) == (0, 16)
    assert (run.core.stats().prefix_cache_queries, run.core.stats().prefix_cache_hits) == (36, 16)
    assert run.tokens("a") == run.tokens("b")


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    run = CoreRun()
    run.submit(request_of("a", 16, max_tokens=1))
    run.finish()
    run.submit(request_of("b", 16, max_tokens=1))
    run.finish()
    assert run.batches() == [{"a": 16}, {"b": 4}]
    assert run.tokens("b") == run.tokens("a")


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    run = CoreRun()
    first = request_of("a", 6, max_tokens=10)
    run.submit(first)
    run.finish()
    run.submit(make_request("b", [*first.prompt_token_ids, *run.tokens("a"), 5], max_tokens=1))
    run.finish()
    cached = run.last("b").num_cached_tokens
    assert cached is not None
    assert cached >= 12


def test_a_request_for_prompt_logprobs_reads_no_cache() -> None:
    run = CoreRun()
    run.submit(request_of("a", 18, max_tokens=1))
    run.finish()
    run.submit(make_request("b", [0, *range(1, 18)], max_tokens=1, prompt_logprobs=0))
    run.finish()
    assert run.batches()[-1] == {"b": 18}
    assert [logprob.rank for output in run.outputs["b"] for logprob in output.prompt_logprobs] == list(range(1, 18))


def test_salted_requests_share_with_the_same_salt_only() -> None:
    run = CoreRun()
    for request_id, salt in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "")):
        run.submit(make_request(request_id, range(18), max_tokens=1, cache_salt=salt))
        run.finish()
    assert [run.last(request_id).num_cached_tokens for request_id in "abcd"] == [0, 0, 16, 0]


def test_a_reset_cache_is_empty_for_later_requests() -> None:
    run = CoreRun()
    run.submit(request_of("a", 18, max_tokens=9))
    run.steps(3)
    run.core.operate(ResetPrefixCache())
    run.finish()
    run.submit(request_of("b", 18, max_tokens=1))
    run.finish()
    assert run.last("b").num_cached_tokens == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_memory_pressure_preempts_the_newest(async_scheduling: bool) -> None:
    run = CoreRun(num_blocks=6, async_scheduling=async_scheduling, enable_prefix_caching=False)
    requests = [request_of("a", 8, max_tokens=12), request_of("b", 8, max_tokens=12, start=1)]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    assert EventType.PREEMPTED not in run.event_types("a")
    assert run.event_types("b") == [
        EventType.QUEUED,
        EventType.SCHEDULED,
        EventType.FIRST_TOKEN,
        EventType.PREEMPTED,
        EventType.RESUMED,
        EventType.FINISHED,
    ]
    assert run.core.stats().num_preemptions == 1


def test_priority_policy_runs_lower_numbers_first() -> None:
    run = CoreRun(policy="priority", max_num_seqs=1)
    run.submit(
        request_of("later", 3, priority=1), request_of("sooner", 3, priority=-1), request_of("too", 3, priority=1)
    )
    run.finish()
    order = list(dict.fromkeys(request_id for batch in run.batches() for request_id in batch))
    assert order == ["sooner", "later", "too"]


def test_fcfs_policy_ignores_priority() -> None:
    run = CoreRun(policy="fcfs", max_num_seqs=1)
    run.submit(request_of("first", 3, priority=1), request_of("second", 3, priority=-1))
    run.finish()
    assert list(run.batches()[0]) == ["first"]


def test_priority_policy_preempts_the_lowest_priority_though_it_is_older() -> None:
    run = CoreRun(policy="priority", num_blocks=6, enable_prefix_caching=False)
    low, high = request_of("low", 8, 12, priority=5), request_of("high", 8, 12, start=1, priority=0)
    run.submit(low)
    run.step()
    run.submit(high)
    run.finish()
    run.assert_complete([low, high])
    assert EventType.PREEMPTED in run.event_types("low")
    assert EventType.PREEMPTED not in run.event_types("high")


def test_the_first_that_does_not_fit_is_not_overtaken_by_smaller_ones() -> None:
    run = CoreRun(num_blocks=6, async_scheduling=False)
    run.submit(request_of("a", 12, max_tokens=4), request_of("big", 16, start=1), request_of("small", 2, start=2))
    run.step()
    assert run.batches() == [{"a": 12}]
    run.finish()
    assert [run.events(request_id)[1].timestamp for request_id in ("big", "small")] == sorted(
        run.events(request_id)[1].timestamp for request_id in ("big", "small")
    )


def test_a_full_queue_rejects() -> None:
    run = CoreRun(max_waiting_requests=2)
    run.submit(*(request_of(f"r{index}", 3) for index in range(3)))
    run.finish()
    (rejection,) = run.rejections
    assert (rejection.request_id, rejection.code) == ("r2", "resource_exhausted")
    assert "queue is full (2 requests wait)" in rejection.message
    assert set(run.outputs) == {"r0", "r1"}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(prompt=[]), "the prompt must hold at least one token"),
        (
            make_request(prompt=range(40)),
            "the prompt's 40 tokens leave no room for an output",
        ),
        (make_request(prompt=range(33)), "the prompt's 33 tokens exceed the engine's KV cache, which holds 32 tokens"),
        (
            make_request(prompt=range(20), resumed=range(20), max_tokens=30),
            "and the 20 already generated leave no room",
        ),
        (make_request(resumed=[1, 2], max_tokens=2), "max_tokens (2) leaves no token after the 2 already generated"),
    ],
)
def test_requests_that_can_never_be_served_are_rejected_at_once(request_: EngineCoreRequest, message: str) -> None:
    run = CoreRun(num_blocks=8, max_model_len=40)
    run.submit(request_)
    run.finish()
    (rejection,) = run.rejections
    assert rejection.code == "invalid_argument"
    assert message in rejection.message
    assert not run.batches()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_request_alone_that_fills_the_cache_ends_by_length(async_scheduling: bool) -> None:
    run = CoreRun(num_blocks=4, max_model_len=100, async_scheduling=async_scheduling)
    request = request_of("a", 5, max_tokens=90)
    run.submit(request)
    run.finish()
    assert run.finish_reason() is FinishReason.LENGTH
    assert run.last().num_output_tokens == 4 * 4 + 1 - 5  # the last token is sampled, but never computed
    assert run.core.stats().num_preemptions == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(1, 50), (5, 50), (None, 20)])
def test_nothing_is_scheduled_past_the_limits(
    async_scheduling: bool, max_tokens: int | None, max_model_len: int
) -> None:
    run = CoreRun(async_scheduling=async_scheduling, max_model_len=max_model_len)
    run.submit(make_request(prompt=range(6), max_tokens=max_tokens))
    run.finish()
    num_output = max_tokens or max_model_len - 6
    assert sum(sum(batch.values()) for batch in run.batches()) == 6 + num_output - 1
    assert run.last().num_output_tokens == num_output
    assert run.finish_reason() is FinishReason.LENGTH


def test_resumed_tokens_count_as_output() -> None:
    prompt = [1, 2, 3]
    whole = generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True), frozenset(), 128)
    run = CoreRun()
    run.submit(make_request("a", prompt, max_tokens=8, resumed=whole[:5]))
    run.finish()
    assert run.tokens() == whole[5:]
    assert (run.last().num_prompt_tokens, run.last().num_output_tokens) == (3, 8)
    assert run.batches()[0] == {"a": 8}


def test_resumed_requests_are_scheduled_before_waiting_ones() -> None:
    run = CoreRun(max_num_seqs=1, async_scheduling=False)
    run.submit(request_of("running", 3), request_of("waiting", 3, start=1))
    run.step()
    run.submit(make_request("resumed", [2, 2, 2], max_tokens=4, resumed=[5]))
    run.finish()
    assert list(dict.fromkeys(name for batch in run.batches() for name in batch)) == ["running", "resumed", "waiting"]


def test_resumed_tokens_hit_the_prefix_cache() -> None:
    prompt = [1, 2, 3]
    whole = generate(prompt, SamplingParams(max_tokens=20, ignore_eos=True), frozenset(), 128)
    run = CoreRun(block_size=4)
    run.submit(make_request("before", [*prompt, *whole[:8]], max_tokens=1))
    run.finish()
    run.submit(make_request("a", prompt, max_tokens=20, resumed=whole[:10]))
    run.finish()
    assert run.batches()[1] == {"a": 13 - 8}
    assert run.tokens("a") == whole[10:]


def test_stats_count_running_and_waiting_requests() -> None:
    run = CoreRun(max_num_seqs=1, num_blocks=10)
    run.submit(request_of("a", 8), request_of("b", 5), request_of("c", 6))
    run.step()
    stats = run.core.stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_waiting_tokens) == (1, 2, 11)
    assert stats.kv_cache_usage == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_waiting_requests", "max_model_len"])
def test_invalid_limits_are_rejected_by_name(name: str) -> None:
    limits = {"max_model_len": 10, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        SchedulerConfig(**limits)  # type: ignore[arg-type]
