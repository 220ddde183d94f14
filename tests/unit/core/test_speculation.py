"""Draft tokens in the core: scheduled for the upper bound, corrected one step later."""

from collections.abc import Callable
from typing import Any

import pytest

from proa.contract import FinishReason
from proa_engine.core.speculation import DraftCounter
from proa_engine.core.timing.draft_depth import ScheduledDepth
from proa_engine.core.types import Drafts
from support.core import EOS, CoreRun, make_request
from support.fake_executor import VOCAB_SIZE, generate

NUM_DRAFTS = 3


def all_accepted(num_drafts: int) -> int:
    return num_drafts


def none_accepted(_num_drafts: int) -> int:
    return 0


def run_with_drafts(accept: Callable[[int], int], **settings: object) -> CoreRun:
    return CoreRun(num_speculative_tokens=NUM_DRAFTS, accept=accept, **settings)  # type: ignore[arg-type]


def batches_of_one(run: CoreRun) -> list[int]:
    return [sum(batch.values()) for batch in run.batches()]


def test_decodes_are_scheduled_with_drafts_and_prompts_without() -> None:
    run = run_with_drafts(none_accepted)
    run.submit(make_request("a", range(5), max_tokens=12))
    run.finish()
    assert batches_of_one(run)[:3] == [5, 4, 4]
    run.assert_complete([make_request("a", range(5), max_tokens=12)])


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_accepted_drafts_save_steps(async_scheduling: bool) -> None:
    run = run_with_drafts(all_accepted, async_scheduling=async_scheduling)
    request = make_request("a", range(5), max_tokens=33)
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert len(run.batches()) == 1 + 32 / (1 + NUM_DRAFTS)
    counters = run.core.counters()
    assert (counters.drafts.num_drafts, counters.drafts.num_draft_tokens) == (8, 24)
    assert counters.drafts.num_accepted_tokens == 24
    assert counters.drafts.num_accepted_per_position == [8, 8, 8]


def test_drafts_are_counted_by_room_and_by_way_to_draw() -> None:
    counter = DraftCounter(ScheduledDepth([(1, 3)]))
    counter.add(Drafts(3, 3, (1, 0, 1)), 2, 0.1)
    counter.add(Drafts(3, 2, (1, 1, 1)), 2, 0.5)
    counter.add(Drafts(1, 0), 0, 0.9)
    assert counter.counts.num_planned == {3: 2, 1: 1}
    assert {key: count for key, count in counter.counts.num_matches.items() if count} == {
        (0, 0): 1,
        (2, 0): 1,
        (0, 2): 1,
        (1, 2): 1,
        (2, 2): 1,
    }


def test_nothing_is_scheduled_past_the_limit_however_many_drafts_are_accepted() -> None:
    for accept in (all_accepted, none_accepted):
        for max_tokens in range(1, 12):
            run = run_with_drafts(accept, max_model_len=14)
            request = make_request("a", range(5), max_tokens=max_tokens)
            run.submit(request)
            run.finish()  # the executor refuses what goes past
            run.assert_complete([request])
            assert run.finish_reason() is FinishReason.LENGTH


def test_near_its_limit_a_request_waits_for_its_step_in_flight() -> None:
    run = run_with_drafts(none_accepted)
    run.submit(make_request("a", range(5), max_tokens=5))
    run.steps(3)
    assert batches_of_one(run) == [5, 4]  # it may have come to its end by now
    run.finish()
    assert batches_of_one(run) == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("num_tokens", range(2, 8))
def test_an_end_in_the_middle_of_accepted_drafts_drops_the_rest(num_tokens: int) -> None:
    params = make_request(max_tokens=20, ignore_eos=False).sampling_params
    prompts = ([first, second, 1] for first in range(VOCAB_SIZE) for second in range(VOCAB_SIZE))
    prompt = next(prompt for prompt in prompts if len(generate(prompt, params, EOS, 128)) == num_tokens)
    run = run_with_drafts(all_accepted)
    request = make_request("a", prompt, max_tokens=20, ignore_eos=False, logprobs=0)
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert run.finish_reason() is FinishReason.STOP
    assert run.last().num_output_tokens == num_tokens
    received = [logprob.token_id for output in run.outputs["a"] for logprob in output.logprobs]
    assert received == run.tokens("a")


def test_drafts_take_only_the_budget_that_others_leave() -> None:
    run = run_with_drafts(none_accepted, max_num_batched_tokens=6)
    run.submit(*(make_request(name, [1, 2], max_tokens=12) for name in "abc"))
    run.finish()
    assert {"a": 4, "b": 1, "c": 1} in [dict(sorted(batch.items())) for batch in run.batches()]


def test_a_preempted_requests_drafts_in_flight_count_before_it_is_scheduled_again() -> None:
    requests = [make_request(name, range(start, start + 8), max_tokens=16) for name, start in (("a", 0), ("b", 20))]
    run = run_with_drafts(all_accepted, num_blocks=8, enable_prefix_caching=False)
    run.submit(*requests)
    run.finish()
    assert run.core.stats().num_preemptions > 0
    run.assert_complete(requests)


@pytest.mark.parametrize("params", [{"min_tokens": 2}, {"bad_words_token_ids": ((1, 2),)}, {"speculative": False}])
def test_requests_whose_rules_count_tokens_and_those_that_say_so_get_no_drafts(params: dict[str, Any]) -> None:
    run = run_with_drafts(all_accepted)
    run.submit(make_request("a", range(5), max_tokens=5, **params))
    run.finish()
    assert batches_of_one(run) == [5, 1, 1, 1, 1]


def test_blocks_of_accepted_drafts_are_hit_once_the_host_knows_them() -> None:
    run = run_with_drafts(all_accepted)
    request = make_request("a", range(6), max_tokens=40)
    run.submit(request)
    run.steps(6)
    known = [*range(6), *run.tokens("a")]
    run.submit(make_request("b", [*known, 1, 2, 3], max_tokens=1))
    run.finish()  # the executor reads every context back
    num_computed = [new.num_computed_tokens for plan in run.executor.plans for new in plan.new_requests]
    assert num_computed[1] >= len(known) - 8  # blocks of four; the last one scheduled is published with the next step


def test_draft_tokens_follow_a_schedule_by_the_rows_of_the_step_before() -> None:
    run = run_with_drafts(none_accepted, draft_schedule=((1, 3), (2, 1), (3, 0)), async_scheduling=False)
    run.submit(*(make_request(name, [1, 2], max_tokens=12) for name in "abc"))
    run.finish()
    rows = [dict(sorted(batch.items())) for batch in run.batches()]
    assert rows[1] == {"a": 1, "b": 1, "c": 1}
    run.submit(make_request("d", [1, 2], max_tokens=6))
    run.finish()
    assert {"d": 1} not in [dict(batch) for batch in run.batches()][-3:-1]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_without_draft_tokens_requests_become_plain_decodes_once_their_position_is_known(
    async_scheduling: bool,
) -> None:
    run = run_with_drafts(lambda count: 1, draft_schedule=((1, 3), (2, 0)), async_scheduling=async_scheduling)
    requests = [make_request(name, [1, 2, start], max_tokens=24) for start, name in enumerate("ab")]
    run.submit(requests[0])
    run.steps(4)  # with drafts, then beside another request without
    run.submit(requests[1])
    run.steps(5)
    step = run.executor.plans[-1]
    assert sorted(step.decode_request_ids) == ["a", "b"]
    assert not step.cached_requests
    run.finish()
    run.assert_complete(requests)
