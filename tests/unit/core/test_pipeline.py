"""Pipeline stages in the core: as many steps in flight as stages, which share the requests that decode."""

import random
from typing import Any

import pytest

from proa_engine.core.scheduler_config import SchedulerConfig
from support.core import CoreRun, make_request


def run_with(num_stages: int, num_requests: int, prompt_length: int = 3, **settings: Any) -> CoreRun:
    run = CoreRun(num_stages=num_stages, max_num_seqs=16, num_blocks=200, block_size=16, **settings)
    requests = [make_request(str(index), range(prompt_length), max_tokens=12) for index in range(num_requests)]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    return run


@pytest.mark.parametrize(("num_stages", "steps"), [(1, 1), (2, 1), (3, 2), (8, 7)])
def test_a_step_for_each_stage_is_in_flight(num_stages: int, steps: int) -> None:
    assert SchedulerConfig(max_model_len=8, pipeline_parallel_size=num_stages).max_steps_in_flight == steps


def test_without_async_scheduling_stages_still_have_a_step_each() -> None:
    config = SchedulerConfig(max_model_len=8, pipeline_parallel_size=3, async_scheduling=False)
    assert config.max_steps_in_flight == 2


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_decodes_are_spread_evenly_over_as_many_steps_as_stages(num_stages: int) -> None:
    run = run_with(num_stages, 11, max_num_batched_tokens=64)
    decodes = [batch for batch in run.batches() if set(batch.values()) == {1}]
    in_turn = decodes[: num_stages * 5]
    most, fewest = -(-11 // num_stages), 11 - (num_stages - 1) * -(-11 // num_stages)
    assert {len(batch) for batch in in_turn} <= {most, fewest}
    for index in range(len(in_turn) - num_stages + 1):
        together = [name for batch in in_turn[index : index + num_stages] for name in batch]
        assert len(together) == len(set(together)) == 11


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_next_step_starts_before_the_result_of_the_one_before_arrives(num_stages: int) -> None:
    log = run_with(num_stages, 6).executor.log
    started = num_in_flight = 0
    seen = []
    for event, step in log:
        started += event == "execute"
        num_in_flight += {"execute": 1, "host": -1}[event]
        seen.append(num_in_flight)
        assert event == "execute" or step <= started - num_stages + 1 or num_in_flight < num_stages
    assert seen.count(num_stages) > 10


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    run = run_with(2, 1, prompt_length=64, max_num_batched_tokens=16)
    assert run.executor.log[:5] == [("execute", 1), ("execute", 2), ("host", 1), ("execute", 3), ("host", 2)]
    assert [batch["0"] for batch in run.batches()[:4]] == [16] * 4


def test_a_lone_request_waits_for_each_of_its_tokens() -> None:
    log = run_with(3, 1).executor.log
    assert log[:6] == [("execute", 1), ("host", 1), ("execute", 2), ("host", 2), ("execute", 3), ("host", 3)]


def test_a_request_that_was_preempted_starts_again_when_its_token_in_flight_is_known() -> None:
    run = CoreRun(num_stages=3, num_blocks=8, enable_prefix_caching=False, max_num_seqs=4)
    requests = [make_request(str(index), range(index, index + 8), max_tokens=16) for index in range(4)]
    run.submit(*requests)
    run.finish()
    assert run.core.stats().num_preemptions > 0
    run.assert_complete(requests)


def test_prompt_logprobs_of_steps_in_flight_at_a_preemption_are_returned_once() -> None:
    num_preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        limits: dict[str, Any] = {"num_blocks": 16, "block_size": 2, "max_model_len": 24}
        run = CoreRun(num_stages=4, max_num_batched_tokens=5, max_num_seqs=4, enable_prefix_caching=False, **limits)
        requests = [
            make_request(str(number), range(length), max_tokens=rng.randint(1, 4), prompt_logprobs=1)
            for number, length in enumerate(rng.choices([2, 3, 16, 20], k=12))
        ]
        for request in requests:
            run.submit(request)
            run.step()
        run.finish()
        for request in requests:
            outputs = run.outputs[request.request_id]
            positions = [entry.rank for output in outputs for entry in output.prompt_logprobs]
            assert positions == list(range(1, len(request.prompt_token_ids)))
        num_preemptions += run.core.stats().num_preemptions
    assert num_preemptions > 10
