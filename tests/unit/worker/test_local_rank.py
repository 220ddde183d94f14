"""LocalRank: steps run in order on a thread of their own, and failure ends all waiting. Over a fake worker."""

from threading import Event, get_ident

import pytest
import torch

from proa_engine.core.executor import ExecutorFailed
from proa_engine.core.types import SchedulerOutput
from proa_engine.worker.async_output import StepTensors
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.local_rank import LocalRank
from proa_engine.worker.step_inputs import StepInputs, build_step_inputs
from proa_engine.worker.warmup import decode_plan, finish_plan, prefill_plan

DEADLINE = 10.0
PREFILL = prefill_plan([5], block_size=4, num_blocks=8)


class FakeWorker:
    """Every forward pass waits for `gate`; sampling gives token 7."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.gate = Event()
        self.gate.set()
        self.error: Exception | None = None
        self.steps_are_small = False
        self.log: list[str] = []
        self.threads: set[int] = set()
        self.batch = InputBatch(
            max_num_seqs=2, max_model_len=16, block_size=4, vocab_size=9, eos_token_ids=[], device=self.device
        )

    def prepare(self, plan: SchedulerOutput) -> StepInputs | None:
        self.log.append("prepare")
        return build_step_inputs(plan, self.batch, 4, 9)

    def is_small(self, inputs: StepInputs) -> bool:
        return self.steps_are_small

    def forward(self, inputs: StepInputs) -> None:
        assert self.gate.wait(DEADLINE)
        self.threads.add(get_ident())
        self.log.append("forward")
        if self.error is not None:
            raise self.error

    def sample(self) -> StepTensors:
        self.log.append("sample")
        return StepTensors(torch.tensor([7]), None, [])

    def shutdown(self) -> None:
        self.log.append("shutdown")


class Harness:
    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.failures: list[str] = []
        self.rank = LocalRank(
            self.worker,  # type: ignore[arg-type]
            explain=lambda error: f"rank 0: {error}",
            on_failure=self.failures.append,
        )


def test_a_step_is_started_and_sampled_while_the_device_is_busy() -> None:
    harness = Harness()
    harness.worker.gate.clear()
    harness.rank.execute_model(PREFILL)
    first = harness.rank.sample_tokens()
    harness.rank.execute_model(finish_plan(["warm-up-0"]))
    second = harness.rank.sample_tokens()
    assert second.done()
    assert not first.done()
    assert harness.worker.log == ["prepare", "prepare"]
    with pytest.raises(TimeoutError):
        first.result(timeout=0.01)
    harness.worker.gate.set()
    assert first.result(DEADLINE).sampled_token_ids == [[7]]
    assert harness.worker.log == ["prepare", "prepare", "forward", "sample"]
    assert get_ident() not in harness.worker.threads
    harness.rank.shutdown()


def test_a_small_step_is_computed_by_whoever_waits_for_it_and_not_before() -> None:
    harness = Harness()
    harness.worker.steps_are_small = True
    harness.rank.execute_model(PREFILL)
    step = harness.rank.sample_tokens()
    assert not step.done()
    assert harness.worker.log == ["prepare"]
    assert step.result(DEADLINE).sampled_token_ids == [[7]]
    assert harness.worker.threads == {get_ident()}
    harness.rank.shutdown()


def test_small_steps_keep_their_place_behind_large_ones_and_before() -> None:
    harness = Harness()
    harness.worker.gate.clear()
    harness.rank.execute_model(PREFILL)
    harness.rank.sample_tokens()
    harness.worker.steps_are_small = True
    harness.rank.execute_model(decode_plan(["warm-up-0"], 5))
    small = harness.rank.sample_tokens()
    harness.worker.steps_are_small = False
    harness.rank.execute_model(decode_plan(["warm-up-0"], 6))
    large = harness.rank.sample_tokens()
    harness.worker.gate.set()
    assert large.result(DEADLINE).sampled_token_ids == [[7]]
    assert small.done()
    assert harness.worker.log == ["prepare"] * 3 + ["forward", "sample"] * 3
    harness.rank.shutdown()
    assert harness.worker.log[-1] == "shutdown"


def test_failure_ends_waiting_at_once_though_the_device_hangs() -> None:
    harness = Harness()
    harness.worker.gate.clear()
    harness.rank.execute_model(PREFILL)
    future = harness.rank.sample_tokens()
    harness.rank.fail("rank 1 was killed")
    harness.rank.fail("a later reason")
    with pytest.raises(ExecutorFailed, match="rank 1 was killed"):
        future.result(DEADLINE)
    for call in (lambda: harness.rank.execute_model(PREFILL), harness.rank.sample_tokens):
        with pytest.raises(ExecutorFailed, match="rank 1 was killed"):
            call()
    assert harness.rank.failure == "rank 1 was killed"
    assert harness.failures == ["rank 1 was killed"]
    harness.worker.gate.set()
    harness.rank.shutdown()
    assert "sample" not in harness.worker.log


def test_what_a_step_raises_fails_the_rank() -> None:
    harness = Harness()
    harness.worker.error = MemoryError("no room for 5 tokens")
    harness.rank.execute_model(PREFILL)
    with pytest.raises(ExecutorFailed, match="rank 0: no room for 5 tokens"):
        harness.rank.sample_tokens().result(DEADLINE)
    assert harness.failures == ["rank 0: no room for 5 tokens"]
    harness.rank.shutdown()


def test_failure_ends_bring_up_too() -> None:
    harness = Harness()
    release = Event()
    harness.rank._thread.submit(lambda: release.wait(DEADLINE))
    harness.rank.fail("rank 1 exited with code 1")
    with pytest.raises(ExecutorFailed, match="rank 1 exited"):
        harness.rank.call(lambda: None)
    release.set()
    harness.rank.shutdown()
