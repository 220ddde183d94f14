"""Inputs of later steps are prepared while a step is in flight; its inputs and its slots' tokens do not change."""

from proa.contract import SamplingParams
from support.runner import RunnerHarness

GREEDY = SamplingParams(temperature=0)
PENALIZED = SamplingParams(temperature=0, repetition_penalty=4.0, frequency_penalty=2.0)


def test_preparing_a_later_step_does_not_change_an_earlier_one() -> None:
    alone = RunnerHarness()
    first_token, second_token = alone.generate([5, 6, 7], GREEDY, 2)
    harness = RunnerHarness(max_num_seqs=2)
    prepare = harness.runner.prepare_inputs
    waiting = [
        prepare(harness.schedule({"a": ([5, 6, 7], 3, GREEDY), "b": ([9, 8], 2, GREEDY)})),
        prepare(harness.schedule(known={"a": 3, "b": 2})),  # reads tokens that the first step samples
        prepare(harness.schedule({"c": ([5, 6, 7], 3, GREEDY)}, finished=["a"])),  # reuses the slot of a
    ]
    first, second, third = [harness.run(inputs) for inputs in waiting]
    assert first.sampled_token_ids[0] == [first_token]
    assert second.sampled_token_ids[0] == [second_token]
    assert third.sampled_token_ids == [[first_token]]


def test_the_extra_token_of_a_finished_request_does_not_reach_its_slots_next_request() -> None:
    harness = RunnerHarness(max_num_seqs=1)
    prepare = harness.runner.prepare_inputs
    waiting = [
        prepare(harness.schedule({"old": ([5, 6, 7], 3, GREEDY)})),
        prepare(harness.schedule(known={"old": 3})),  # one step after its end
        prepare(harness.schedule({"new": ([1] * 12, 12, PENALIZED)}, finished=["old"])),
        prepare(harness.schedule(known={"new": 12})),
    ]
    *_, first, second = [harness.run(inputs).sampled_token_ids[0] for inputs in waiting]
    assert first + second == RunnerHarness().generate([1] * 12, PENALIZED, 2)


def test_penalties_in_a_reused_slot_start_from_the_new_requests_tokens() -> None:
    harness = RunnerHarness(max_num_seqs=1)
    harness.generate(list(range(100)), PENALIZED, 20)
    assert harness.generate([3, 4], PENALIZED, 8) == RunnerHarness().generate([3, 4], PENALIZED, 8)
