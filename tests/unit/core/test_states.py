"""Slots of recurrent states: what a step reads and writes, and where snapshots are. Blocks of four tokens.

The fake executor checks that each state that is read is of exactly the tokens before, and that no slot is written by
one row and used by another.
"""

import pytest

from proa.contract import EngineCoreRequest
from proa_engine.core.kv.block_pool import BlockPool
from proa_engine.core.kv.state_slots import StateSlots
from proa_engine.core.types import StateSteps
from support.core import CoreRun, make_request
from support.fake_executor import generate


def run_with_states(**settings: object) -> CoreRun:
    return CoreRun(**{"num_state_slots": 8, "max_num_seqs": 4, "async_scheduling": False, **settings})  # type: ignore[arg-type]


def finish(run: CoreRun, *requests: EngineCoreRequest) -> list[int | None]:
    """Run requests to their ends. Returns the numbers of cached tokens."""
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    return [run.outputs[request.request_id][0].num_cached_tokens for request in requests]


def states(run: CoreRun) -> list[dict[str, StateSteps]]:
    return [dict(plan.states) for plan in run.executor.plans if not plan.is_empty]


def test_a_prompt_writes_its_end_to_another_slot_and_decodes_say_nothing() -> None:
    run = run_with_states()
    finish(run, make_request("a", range(9), max_tokens=4))
    first, *later = states(run)
    assert first == {"a": StateSteps(-1, ((8, 1), (9, 0)))}
    assert later == [{}, {}, {}]


def test_a_hit_reads_the_snapshot_and_writes_the_requests_own_slot() -> None:
    run = run_with_states()
    found = [finish(run, make_request(name, [*range(8), ord(name), 1, 2], max_tokens=1))[0] for name in "abc"]
    assert found == [0, 8, 8]
    for steps in states(run)[1:]:
        ((read, cuts),) = [(step.read, step.writes) for step in steps.values()]
        assert read == 1
        assert read not in [slot for _, slot in cuts]


def test_a_checkpoint_at_a_chunks_start_leaves_the_slot_and_continues_in_another() -> None:
    run = run_with_states(max_num_batched_tokens=8)
    finish(run, make_request("a", range(9), max_tokens=1))
    assert states(run) == [{"a": StateSteps(-1, ((8, 0),))}, {"a": StateSteps(0, ((9, 1),))}]


def test_a_snapshot_that_one_row_reads_is_not_given_to_another_row() -> None:
    run = run_with_states(num_state_slots=3)
    finish(run, make_request("first", range(9), max_tokens=1))
    reader, writer = make_request("a", [*range(8), 50]), make_request("b", range(20, 29))
    num_checkpoints = len(run.checkpoints)
    run.submit(reader, writer)
    run.step()
    assert len(run.checkpoints) == num_checkpoints  # no slot is left for that of the second prompt
    run.finish()
    run.assert_complete([reader, writer])


def test_a_slot_that_becomes_a_snapshot_is_not_given_to_another_row() -> None:
    run = run_with_states(num_state_slots=3, max_num_batched_tokens=8)
    first, second = make_request("a", range(9)), make_request("b", range(20, 26))
    run.submit(first)
    run.step()
    run.submit(second)
    run.step()  # the first one continues at its checkpoint, and the second one's prompt has one
    run.finish()
    run.assert_complete([first, second])


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_prompt", range(5, 9))
def test_a_stop_token_ends_in_a_snapshot_if_the_state_is_of_a_boundary(async_scheduling: bool, num_prompt: int) -> None:
    prompt = list(range(num_prompt))
    output = generate(prompt, make_request("a", prompt, max_tokens=20).sampling_params, frozenset(), 100)
    num_output = next(count for count in range(3, 20) if output[count - 1] not in output[: count - 1])
    run = run_with_states(async_scheduling=async_scheduling)
    request = make_request("a", prompt, max_tokens=30, stop_token_ids=(output[num_output - 1],))
    finish(run, request)
    known = [*prompt, *output[:num_output]]
    num_in_state = len(known) - (not async_scheduling)  # the step in flight has computed the stop token too
    prompt_end = (num_prompt - 1) // 4 * 4
    expected = num_in_state if num_in_state % 4 == 0 else prompt_end
    assert finish(run, make_request("b", [*known, 1])) == [expected]


def run_with_drafts(num_drafts: int = 3, accepted: int = 2, **settings: object) -> CoreRun:
    return run_with_states(
        num_speculative_tokens=num_drafts,
        accept=lambda count: min(count, accepted),
        **{"num_state_slots": 8, **settings},
    )


def test_the_last_prompt_token_alone_with_drafts_at_a_checkpoint() -> None:
    run = run_with_drafts(max_num_batched_tokens=8)
    finish(run, make_request("a", range(9), max_tokens=9))
    first, second, *later = states(run)
    assert (first, second) == ({"a": StateSteps(-1, ((8, 0),))}, {"a": StateSteps(0, ((12, 1),))})
    assert not any(later), "no later position is known to the host"
    assert finish(run, make_request("b", [*range(8), 40, 41, 42], max_tokens=9)) == [8]
    assert states(run)[len(later) + 2] == {"b": StateSteps(0, ((11, 1),))}


def test_a_prompt_of_one_token_with_drafts_and_states() -> None:
    run = run_with_drafts()
    finish(run, make_request("a", [7], max_tokens=9))
    first, *later = states(run)
    assert first == {"a": StateSteps(-1, ((4, 0),))}
    assert not any(later)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_prompt", range(5, 9))
@pytest.mark.parametrize("accepted", range(4))
def test_a_request_with_drafts_makes_no_snapshot_behind_its_prompt(
    async_scheduling: bool, num_prompt: int, accepted: int
) -> None:
    run = run_with_drafts(async_scheduling=async_scheduling, accepted=accepted, checkpoint_interval=4)
    prompt = list(range(num_prompt))
    output = run.expected(make_request("a", prompt, max_tokens=20))
    stops = [count for count in range(2, 20) if output[count - 1] not in output[: count - 1]]
    for num_output in stops:
        request = make_request(str(num_output), prompt, max_tokens=30, stop_token_ids=(output[num_output - 1],))
        finish(run, request)
        known = [*prompt, *output[:num_output]]
        assert finish(run, make_request(f"after {num_output}", [*known, 1])) <= [(len(known) // 4) * 4]
    first_hit = finish(run, make_request("first", [*prompt, *output[:3], 1]))
    assert first_hit >= [(num_prompt - 1) // 4 * 4], "the prompt has its own"


def test_an_abort_with_an_unknown_token_makes_no_snapshot_of_it() -> None:
    for num_steps in range(2, 9):
        run = CoreRun(num_state_slots=8, max_num_seqs=4)
        request = make_request("a", range(5), max_tokens=20)
        run.submit(request)
        run.steps(num_steps)
        run.executor.while_waiting = lambda run=run: run.core.abort(["a"])
        run.finish()
        run.executor.while_waiting = None
        finish(run, make_request("b", [*range(5), *run.expected(request)[:12]]))


@pytest.mark.parametrize("windows", [(), (5,)])
def test_a_request_preempted_at_its_prompts_end_continues_there(windows: tuple[int, ...]) -> None:
    run = run_with_states(max_num_batched_tokens=8, windows=windows)
    run.submit(make_request("a", range(9)))
    run.step()
    scheduler = run.core._scheduler
    scheduler._table.preempt_last(0.0)
    run.finish()
    run.assert_complete([make_request("a", range(9))])
    assert [new.num_computed_tokens for plan in run.executor.plans for new in plan.new_requests] == [0, 8]


@pytest.mark.parametrize("num_state_slots", [2, 3, 4])
def test_requests_wait_for_a_slot_and_checkpoints_are_left_out(num_state_slots: int) -> None:
    run = run_with_states(num_state_slots=num_state_slots, checkpoint_interval=4)
    finish(run, *[make_request(name, [ord(name) % 3] * 9, max_tokens=9) for name in "abcdef"])
    assert max(len(batch) for batch in run.batches()) <= num_state_slots


def test_one_slot_is_too_few() -> None:
    with pytest.raises(ValueError, match="at least 2 slots, got 1"):
        StateSlots(BlockPool(1, lambda block: ()))
