"""Asynchronous scheduling: step N+1 is scheduled while step N runs."""

import pytest

from proa.contract import EventType, FinishReason
from support.core import EOS, CoreRun, make_request
from support.fake_executor import VOCAB_SIZE, generate

PROMPT = [1, 2, 3]


def prompt_that_stops_after(num_tokens: int, length: int = 3) -> list[int]:
    """A prompt that the fake model answers with `num_tokens` tokens, the last one an end of sequence."""
    params = make_request(max_tokens=20, ignore_eos=False).sampling_params
    for first in range(VOCAB_SIZE):
        for second in range(VOCAB_SIZE):
            prompt = [first, second, *range(1, length - 1)]
            output = generate(prompt, params, EOS, 128)
            if len(output) == num_tokens and output[-1] in EOS:
                return prompt
    raise AssertionError("no such prompt")


def test_the_next_step_starts_before_the_last_ones_tokens_reach_the_host() -> None:
    run = CoreRun()
    run.submit(make_request(max_tokens=4))
    run.finish()
    assert run.executor.log[:6] == [
        ("execute", 1),
        ("execute", 2),
        ("host", 1),
        ("execute", 3),
        ("host", 2),
        ("execute", 4),
    ]
    assert run.tokens() == run.expected(make_request(max_tokens=4))


def test_without_async_scheduling_every_step_waits_for_its_tokens() -> None:
    run = CoreRun(async_scheduling=False)
    run.submit(make_request(max_tokens=3))
    run.finish()
    assert run.executor.log[:4] == [("execute", 1), ("host", 1), ("execute", 2), ("host", 2)]


def test_the_scheduler_output_of_a_decode_has_its_id_alone_until_it_gets_a_block() -> None:
    run = CoreRun()
    run.submit(make_request(max_tokens=3))
    run.finish()
    first, second, third = run.executor.plans[:3]
    assert first.new_requests[0].token_ids == PROMPT
    assert not second.new_requests
    assert not second.cached_requests
    assert second.decode_request_ids == ["a"]
    assert [(known.num_computed_tokens, list(map(len, known.new_block_ids))) for known in third.cached_requests] == [
        (4, [1])
    ]


def test_lists_of_ids_stay_the_same_objects_while_the_decodes_are_the_same() -> None:
    run = CoreRun(block_size=16)
    run.submit(make_request("a"), make_request("b"), make_request("c", max_tokens=4))
    run.finish()
    decodes = [plan.decode_request_ids for plan in run.executor.plans[1:]]
    assert [len(ids) for ids in decodes] == [3, 3, 3, 2, 2, 2, 2, 0]
    assert decodes[0] is decodes[1] is decodes[2]
    assert decodes[3] is decodes[4] is decodes[6]
    assert len({id(plain.request_ids) for plain in run.plain if len(plain.request_ids) == 2}) == 1


def test_blocks_are_found_by_the_next_step_and_not_by_the_one_that_fills_them() -> None:
    run = CoreRun()
    run.submit(make_request("a", range(9)), make_request("b", range(9)))
    run.step()
    assert len(run.cached_hashes) == 2
    run.submit(make_request("c", range(9)))
    run.step()
    assert [[new.num_computed_tokens for new in plan.new_requests] for plan in run.executor.plans] == [[0, 0], [8]]


def test_a_finished_requests_extra_step_is_dropped() -> None:
    prompt = prompt_that_stops_after(3)
    run = CoreRun()
    request = make_request("a", prompt, max_tokens=20, ignore_eos=False)
    run.submit(request)
    run.finish()
    assert len(run.batches()) == 4  # three tokens and one step too many
    assert run.tokens() == run.expected(request)
    assert len(run.tokens()) == 3
    assert run.finish_reason() is FinishReason.STOP
    assert run.last().num_output_tokens == 3


def test_blocks_of_a_finished_request_are_reused_by_the_step_after_the_one_in_flight() -> None:
    run = CoreRun(num_blocks=2, max_num_seqs=2, enable_prefix_caching=False)
    first = make_request("a", prompt_that_stops_after(3, length=4), ignore_eos=False)
    second = make_request("b", [9, 8, 7, 6, 5], max_tokens=2)
    run.submit(first, second)
    run.finish()  # the executor reads every context back, in the order of the steps
    run.assert_complete([first, second])


def test_an_aborted_requests_token_in_flight_is_dropped() -> None:
    run = CoreRun()
    run.submit(make_request("a", max_tokens=20), make_request("b", [4, 5, 6], max_tokens=5))
    run.steps(3)
    seen = len(run.tokens("a"))
    run.core.abort(["a"])
    run.finish()
    assert len(run.tokens("a")) == seen
    assert run.finish_reason("a") is FinishReason.ABORT
    run.assert_complete([make_request("b", [4, 5, 6], max_tokens=5)])


def test_a_result_belongs_to_its_steps_request_even_if_the_id_is_reused() -> None:
    run = CoreRun()
    run.submit(make_request("a", [1, 2, 3], max_tokens=20, logprobs=0))
    run.steps(2)  # one step is in flight
    run.core.abort(["a"])
    again = make_request("a", [7, 8, 9, 10], max_tokens=4)
    run.submit(again)
    before = len(run.tokens("a"))
    run.finish()
    assert run.tokens("a")[before:] == run.expected(again)


def preempted_in_flight() -> CoreRun:
    """A run that has just planned the step which took b's memory, while b's token was in flight."""
    run = CoreRun(num_blocks=6, enable_prefix_caching=False)
    run.submit(make_request("a", range(8), max_tokens=12), make_request("b", range(20, 28), max_tokens=12))
    while run.core.stats().num_preemptions == 0:
        tokens = len(run.tokens("b"))
        run.step()
    assert "b" in run.executor.plans[-2].num_scheduled_tokens
    assert run.executor.plans[-1].preempted_request_ids == ["b"]
    assert len(run.tokens("b")) == tokens + 1  # b no longer runs, but its token was in flight
    return run


def test_a_preempted_requests_late_token_is_appended_before_it_is_scheduled_again() -> None:
    run = preempted_in_flight()
    known = len(run.tokens("b"))
    run.finish()
    (again,) = (new for plan in run.executor.plans[1:] for new in plan.new_requests)
    assert (again.request_id, again.num_computed_tokens) == ("b", 0)
    assert again.token_ids == [*range(20, 28), *run.tokens("b")[:known]]
    run.assert_complete([make_request("a", range(8), max_tokens=12), make_request("b", range(20, 28), max_tokens=12)])


def test_workers_are_notified_once_of_a_preempted_request_that_is_aborted() -> None:
    run = preempted_in_flight()
    run.core.abort(["b"])
    run.finish()
    seen = [request_id for plan in run.executor.plans for request_id in plan.finished_request_ids]
    assert seen == ["a"]
    assert run.finish_reason("b") is FinishReason.ABORT


def test_a_late_token_can_finish_a_preempted_request() -> None:
    run = CoreRun(num_blocks=4, enable_prefix_caching=False)
    requests = [make_request("a", range(8), max_tokens=3), make_request("b", range(20, 25), max_tokens=1)]
    run.submit(*requests)
    run.finish()  # the second step takes b's memory for a, when b only waits for its one token
    run.assert_complete(requests)
    assert run.event_types("b")[-3:] == [EventType.PREEMPTED, EventType.FIRST_TOKEN, EventType.FINISHED]
    assert run.finish_reason("b") is FinishReason.LENGTH


def test_blocks_are_hit_only_by_steps_after_the_one_that_computes_them() -> None:
    run = CoreRun()
    run.submit(make_request("a", range(9), max_tokens=1), make_request("b", range(9), max_tokens=1))
    run.finish()
    run.submit(make_request("c", range(9), max_tokens=1))
    run.finish()
    assert run.batches() == [{"a": 9, "b": 9}, {"c": 1}]


def test_a_block_is_hit_while_the_step_that_computes_it_is_in_flight() -> None:
    run = CoreRun()
    run.submit(make_request("a", range(9), max_tokens=3))
    run.step()
    run.submit(make_request("b", range(9), max_tokens=3))
    run.step()
    assert run.batches() == [{"a": 9}, {"a": 1, "b": 1}]
    assert run.executor.log[:2] == [("execute", 1), ("execute", 2)]
    run.finish()
    assert run.tokens("a") == run.tokens("b")


def test_a_block_is_not_hit_before_the_host_knows_its_tokens() -> None:
    run = CoreRun()
    run.submit(make_request("a", range(7), max_tokens=12))
    answer = generate(range(7), make_request(max_tokens=12).sampling_params, frozenset(), 128)
    run.steps(2)  # the eighth token is computed by the second step, and known once its tokens are at the host
    run.submit(make_request("b", [*range(7), *answer[:5]], max_tokens=1))
    run.step()
    assert run.executor.plans[2].new_requests[0].num_computed_tokens == 4
    run.finish()
    assert run.tokens("b") == answer[5:6]


def test_prompt_logprobs_are_sent_once_though_a_preemption_computes_them_twice() -> None:
    run = CoreRun(num_blocks=6, enable_prefix_caching=False, max_num_batched_tokens=5)
    requests = [make_request("a", range(8), max_tokens=12), make_request("b", range(20, 28), prompt_logprobs=0)]
    run.submit(*requests)
    run.finish()
    assert EventType.RESUMED in run.event_types("b")
    assert [logprob.rank for output in run.outputs["b"] for logprob in output.prompt_logprobs] == list(range(1, 8))


def test_workers_are_notified_of_finished_requests_with_the_next_tokens_or_at_once_if_none_follow() -> None:
    run = CoreRun()
    run.submit(make_request("a", max_tokens=1), make_request("b", max_tokens=3))
    run.finish()
    seen = [(plan.total_num_scheduled_tokens, plan.finished_request_ids) for plan in run.executor.plans]
    assert seen == [(6, []), (1, []), (1, ["a"]), (0, ["b"])]


@pytest.mark.parametrize("num_requests", [1, 5])
def test_outputs_are_the_same_without_async_scheduling(num_requests: int) -> None:
    requests = [
        make_request(f"r{index}", [index, 2, 3], max_tokens=20, ignore_eos=False, logprobs=0)
        for index in range(num_requests)
    ]
    seen = []
    for async_scheduling in (True, False):
        run = CoreRun(async_scheduling=async_scheduling)
        run.submit(*requests)
        run.finish()
        seen.append(
            [
                (output.request_id, output.new_token_ids, output.logprobs, output.finish_reason, output.stop_reason)
                for request in requests
                for output in run.outputs[request.request_id]
            ]
        )
    assert seen[0] == seen[1]
