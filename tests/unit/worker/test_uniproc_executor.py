"""UniProcExecutor over a fake worker: steps run in order on the device thread, and a failure ends all waiting."""

from collections.abc import Callable
from threading import Event, get_ident
from types import SimpleNamespace

import pytest
import torch

from proa_engine.config import EngineConfig
from proa_engine.core.executor import ExecutorFailed
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.core.timing.step_costs import StepCosts
from proa_engine.core.types import Copies, SchedulerOutput
from proa_engine.executor import uniproc
from proa_engine.executor.uniproc import UniProcExecutor
from proa_engine.memory.cache_plan import CacheMemory
from proa_engine.memory.kv_cache import CacheSizes, WorkerSizes
from proa_engine.mover.messages import ToCore
from proa_engine.step.async_output import StepTensors
from proa_engine.step.step_inputs import StepInputs
from proa_engine.worker.warmup_steps import decode_step, finish_step, prefill_step
from proa_engine.worker.worker import StartedRank
from support.masks import masks_of
from support.runner import input_builder, make_batch

DEADLINE = 10.0
GROUPS = CacheGroups(num_blocks=8, block_size=4)
PREFILL = prefill_step([5], GROUPS)


class FakeWorker:
    """A worker and its model runner. Every forward pass waits for `gate`; sampling returns token 7."""

    model_config = SimpleNamespace(eos_token_ids=[], has_lm_head=True)
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model_runner = self.weights = self.tiers = self
        self.memory = CacheMemory()
        self.gate = Event()
        self.gate.set()
        self.unloaded = Event()
        self.error: Exception | None = None
        self.steps_are_small = False
        self.log: list[str] = []
        self.masks: list[GrammarMasks | None] = []
        self.threads: set[int] = set()
        self.batch = make_batch(max_num_seqs=2, max_model_len=16, vocab_size=9)

    def init_device(self) -> None:
        pass

    def load_model(self, _compile_pool: None) -> WorkerSizes:
        return WorkerSizes(CacheSizes(8, 0, 2), block_bytes=1, weight_bytes=1, tables=(0,))

    def take_disk_folder(self) -> str:
        return ""

    def start(self, sizes: CacheSizes, _disk_folder: str, _on_mover: Callable[[ToCore], None]) -> StartedRank:
        return StartedRank(16, GROUPS, StepCosts(), load_rate=0.0, mover_port=None, fingerprint=b"", description="Fake")

    def begin_step(self, copies: Copies, _memory: CacheMemory) -> None:
        if copies:
            self.log.append("copy")

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> StepInputs | None:
        self.log.append("prepare")
        return input_builder(self.batch, max_small_tokens=100 if self.steps_are_small else 0).build(scheduler_output)

    def execute_model(self, inputs: StepInputs) -> None:
        assert self.gate.wait(DEADLINE)
        self.threads.add(get_ident())
        self.log.append("execute")
        if self.error is not None:
            raise self.error

    def sample_tokens(self, masks: GrammarMasks | None = None) -> StepTensors:
        self.log.append("sample")
        self.masks.append(masks)
        return StepTensors(torch.tensor([7]))

    def load_lora(self, lora_id: int, path: str) -> str:
        if path == "hangs":
            self.gate.wait()
        return f"digest of {path}"

    def unload_lora(self, lora_id: int) -> None:
        self.log.append(f"unload {lora_id}")
        self.unloaded.set()

    def shutdown(self) -> None:
        self.log.append("shutdown")


class Harness:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker = FakeWorker()
        self.lines: list[str] = []
        monkeypatch.setattr(uniproc, "Worker", lambda *_, **__: self.worker)
        self.executor = UniProcExecutor(EngineConfig(model="fake", device="cpu"), self.lines.append)
        self.log_of_start = list(self.worker.log)
        self.worker.log.clear()
        self.worker.threads.clear()


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(monkeypatch)


def test_the_caller_s_thread_has_run_a_prefill_and_a_decode_before_it_serves(harness: Harness) -> None:
    assert harness.log_of_start == ["prepare", "execute", "sample"] * 2 + ["prepare"]
    harness.executor.shutdown()


def test_a_step_is_started_and_sampled_while_the_device_is_busy(harness: Harness) -> None:
    harness.worker.gate.clear()
    harness.executor.execute_model(PREFILL)
    first = harness.executor.sample_tokens()
    harness.executor.execute_model(finish_step(["warm-up-0"]))
    second = harness.executor.sample_tokens()
    assert second.done()
    assert not first.done()
    assert harness.worker.log == ["prepare", "prepare"]
    with pytest.raises(TimeoutError):
        first.result(timeout=0.01)
    harness.worker.gate.set()
    assert first.result(DEADLINE).plain_token_ids == [7]
    assert harness.worker.log == ["prepare", "prepare", "execute", "sample"]
    assert get_ident() not in harness.worker.threads
    harness.executor.shutdown()


def test_masks_reach_the_sampling_of_their_step(harness: Harness) -> None:
    harness.worker.masks.clear()
    masks = masks_of({0: [7]}, 9)
    harness.executor.execute_model(PREFILL)
    harness.executor.sample_tokens(masks).result(DEADLINE)
    harness.executor.execute_model(decode_step(["warm-up-0"], 5))
    harness.executor.sample_tokens().result(DEADLINE)
    assert harness.worker.masks == [masks, None]
    harness.executor.shutdown()


def test_a_host_buffer_can_be_written_and_lives_as_long_as_its_views(harness: Harness) -> None:
    view = harness.executor.make_host_buffer(12)[4:8]
    view[:] = b"\1\2\3\4"
    assert torch.frombuffer(view, dtype=torch.int32).tolist() == [0x04030201]
    harness.executor.shutdown()


def test_a_small_step_is_computed_by_the_thread_that_waits_for_it(harness: Harness) -> None:
    harness.worker.steps_are_small = True
    harness.executor.execute_model(PREFILL)
    step = harness.executor.sample_tokens()
    assert not step.done()
    assert harness.worker.log == ["prepare"]
    assert step.result(DEADLINE).plain_token_ids == [7]
    assert harness.worker.threads == {get_ident()}
    harness.executor.shutdown()


def test_small_and_large_steps_run_in_order(harness: Harness) -> None:
    harness.worker.gate.clear()
    harness.executor.execute_model(PREFILL)
    harness.executor.sample_tokens()
    harness.worker.steps_are_small = True
    harness.executor.execute_model(decode_step(["warm-up-0"], 5))
    small = harness.executor.sample_tokens()
    harness.worker.steps_are_small = False
    harness.executor.execute_model(decode_step(["warm-up-0"], 6))
    large = harness.executor.sample_tokens()
    harness.worker.gate.set()
    assert large.result(DEADLINE).plain_token_ids == [7]
    assert small.done()
    assert harness.worker.log == ["prepare"] * 3 + ["execute", "sample"] * 3
    harness.executor.shutdown()
    assert harness.worker.log[-1] == "shutdown"


def test_failure_ends_waiting_at_once_while_the_device_hangs(harness: Harness) -> None:
    harness.worker.gate.clear()
    harness.executor.execute_model(PREFILL)
    future = harness.executor.sample_tokens()
    harness.executor.fail("rank 1 was killed")
    harness.executor.fail("a later reason")
    with pytest.raises(ExecutorFailed, match="rank 1 was killed"):
        future.result(DEADLINE)
    for call in (lambda: harness.executor.execute_model(PREFILL), harness.executor.sample_tokens):
        with pytest.raises(ExecutorFailed, match="rank 1 was killed"):
            call()
    assert harness.executor.failure == "rank 1 was killed"
    assert harness.lines[-1] == "rank 1 was killed"
    harness.worker.gate.set()
    harness.executor.shutdown()
    assert "sample" not in harness.worker.log


def test_an_exception_in_a_step_fails_the_executor(harness: Harness) -> None:
    harness.worker.error = MemoryError("no room for 5 tokens")
    harness.executor.execute_model(PREFILL)
    with pytest.raises(ExecutorFailed, match="rank 0: MemoryError: no room for 5 tokens"):
        harness.executor.sample_tokens().result(DEADLINE)
    assert harness.lines[-1] == "rank 0: MemoryError: no room for 5 tokens"
    harness.executor.shutdown()


def test_failure_ends_starting_while_the_device_hangs(harness: Harness) -> None:
    release = Event()
    harness.executor._device_thread.submit(lambda: release.wait(DEADLINE))
    harness.executor.fail("rank 1 exited with code 1")
    with pytest.raises(ExecutorFailed, match="rank 1 exited"):
        harness.executor._call(lambda: None)
    release.set()
    harness.executor.shutdown()


def test_an_adapter_that_cannot_be_read_in_time_blocks_no_other_and_is_freed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uniproc, "LORA_SECONDS", 0.05)
    harness.worker.gate.clear()
    with pytest.raises(LoraNotFound, match="the adapter at hangs cannot be read: it took longer than 0 s"):
        harness.executor.load_lora(1, "hangs").result(DEADLINE)
    monkeypatch.setattr(uniproc, "LORA_SECONDS", DEADLINE)
    assert harness.executor.load_lora(2, "other").result(DEADLINE) == "digest of other"
    assert harness.worker.log == []
    harness.worker.gate.set()
    assert harness.worker.unloaded.wait(DEADLINE)
    assert harness.worker.log == ["unload 1"]
    harness.executor.shutdown()
