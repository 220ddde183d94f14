"""UniProcExecutor: runs rank 0 in the engine's process. It owns the thread of the steps and the order of its work."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

import torch

from proa.contract import KvTransfer
from proa_engine.config import EngineConfig
from proa_engine.core.executor import ExecutorFailed, StepFuture
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.core.types import Copies, ModelRunnerOutput, SchedulerOutput
from proa_engine.executor.failure import Failure
from proa_engine.executor.movers import RankMovers
from proa_engine.executor.started import StartedRanks
from proa_engine.memory.kv_cache import WorkerSizes, host_tier, smallest
from proa_engine.mover.messages import FromCore
from proa_engine.step.async_output import AsyncOutput, collect
from proa_engine.step.device_thread import DeviceThread, run_beside_steps, within
from proa_engine.step.step_inputs import StepInputs
from proa_engine.worker.compile_pool import CompilePool, start_compile_pool
from proa_engine.worker.warmup_steps import first_pooled_steps, first_steps
from proa_engine.worker.worker import StartedRank, Worker

T = TypeVar("T")
_CLOSE_SECONDS = 5.0
LORA_SECONDS = 300.0  # timeout of reading an adapter, which may be downloaded
_EMPTY_OUTPUT = ModelRunnerOutput(plain_token_ids=[])


class UniProcExecutor:
    """An executor of one rank. The constructor returns once the model is loaded and warmed up.

    On a CPU, steps run in order on a device thread, small ones on the thread that waits for them. On CUDA the calling
    thread launches them and the device's stream orders them. After a failure every call and every future raises
    ExecutorFailed.
    """

    def __init__(
        self, config: EngineConfig, log: Callable[[str], None], compile_pool: CompilePool | None = None
    ) -> None:
        """`compile_pool` is what `begin_compile_pool` returned; None: a pool is started if one is needed."""
        self._config = config
        # Before any of the movers starts, because it sends messages at once.
        self._movers = RankMovers(
            self._send_to_movers, config.parallel.num_ranks, adopts=config.kv_tiers.kv_offloading_path is not None
        )
        self._worker = Worker(config, 0, log, ranks_here=config.parallel.ranks_here)
        self._log = log
        self._compile_pool = compile_pool
        self._device_thread = DeviceThread("proa-device")
        self._failure = Failure()
        self._inputs: StepInputs | None = None  # inputs of the step that is executed and not yet sampled
        self._execution: Future[None] = Future()  # of that step, on a CPU
        self._copy_stream: torch.cuda.Stream | None = None
        # A waiting thread that computes a step cannot see another rank's failure.
        self._may_help = config.parallel.num_ranks == 1
        try:
            self.started = self._start()
            self._run_first_steps()
        except BaseException:
            self.shutdown()
            raise
        log(f"proa-engine {version('proa-engine')} with {config.model_name}: {self.started}")

    @property
    def failure(self) -> str | None:
        """Why the executor failed; None if it has not."""
        return self._failure.reason

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._failure.check()
        copies = scheduler_output.copies
        self._inputs = inputs = self._worker.model_runner.prepare_inputs(scheduler_output)
        if inputs is None and not copies:
            return
        if self._worker.device.type == "cuda":
            torch.cuda.set_device(self._worker.device)
            self._guarded(lambda: self._execute(copies, inputs))
        else:
            wake = inputs is None or not (inputs.is_small and self._may_help)
            self._execution = self._device_thread.submit(
                lambda: self._guarded(lambda: self._execute(copies, inputs)), wake=wake
            )

    def draft_tokens(self) -> dict[int, list[int]]:
        inputs, draft_tokens = self._inputs, dict[int, list[int]]()
        if inputs is None:
            return draft_tokens
        for draft_copy in (each for part in inputs.parts for each in part.draft_copies):
            if inputs.is_small and self._may_help:
                self._device_thread.help(self._execution)
            self._failure.wait_for(draft_copy.started)
            draft_tokens |= draft_copy.by_row()
        return draft_tokens

    def sample_tokens(self, masks: GrammarMasks | None = None) -> StepFuture:
        """Sample the step that `execute_model` started. `masks` are read until the future is done."""
        self._failure.check()
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            future: Future[ModelRunnerOutput] = Future()
            future.set_result(_EMPTY_OUTPUT)
            return future
        return self._start_sampling(inputs, masks)

    def _start_sampling(self, inputs: StepInputs, masks: GrammarMasks | None) -> StepFuture:
        """Sample the oldest step that is executed and not sampled, which has these inputs."""
        self._failure.check()
        if self._worker.device.type == "cuda":
            return self._launch_sampling(inputs, masks)
        future = self._failure.begin_step()
        is_small = inputs.is_small and self._may_help
        job = self._device_thread.submit(
            lambda: self._guarded(lambda: self._resolve(future, inputs, masks)), wake=not is_small
        )
        return _SmallStepFuture(future, job, self._device_thread) if is_small else future

    def fail(self, reason: str) -> None:
        """Make all current and later calls and futures raise ExecutorFailed. Thread-safe; the first reason is kept."""
        if self._failure.fail(reason):
            self._log(reason)

    def make_host_buffer(self, num_bytes: int) -> memoryview:
        is_pinned = self._worker.device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned).numpy().data

    def sleep(self, level: int) -> None:
        """Free this rank's KV cache and weights, see `Worker.sleep`."""
        self._call(lambda: self._worker.sleep(level))

    def wake_up(self) -> None:
        """Undo `sleep`: get the weights back, allocate a KV cache of as many blocks, and capture CUDA graphs again."""
        self._call(self._worker.wake_up)

    def load_lora(self, lora_id: int, path: str) -> "Future[str]":
        """See `LoraStore`."""
        return self._read_lora(lora_id, path, lambda: self._worker.weights.load_lora(lora_id, path))

    def unload_lora(self, lora_id: int) -> None:
        self._worker.weights.unload_lora(lora_id)

    def _read_lora(self, lora_id: int, path: str, read: Callable[[], str]) -> "Future[str]":
        """Read an adapter on a thread of its own. If reading times out, the adapter is freed when it is read, because
        the core has given it up."""
        late = LoraNotFound(f"the adapter at {path} cannot be read: it took longer than {LORA_SECONDS:.0f} s")
        job = run_beside_steps(read, "proa-lora")
        return within(LORA_SECONDS, job, late, lambda: self.unload_lora(lora_id))

    def shutdown(self) -> None:
        """Finish started steps and release the device. A hung device thread is abandoned. May be called twice."""
        if self._device_thread.close(_CLOSE_SECONDS):
            self._worker.shutdown()

    def _start(self) -> StartedRanks:
        """Load the model, allocate the KV cache and warm up."""
        compile_pool = self._call(lambda: start_compile_pool(self._config, 0, self._compile_pool))
        self._call(self._worker.init_device)
        sizes = [self._call(lambda: self._worker.load_model(compile_pool))]
        rank = self._start_worker(sizes, self._call(self._worker.take_disk_folder))
        return self._merge_ranks(rank, sizes, [rank.mover_port])

    def _start_worker(self, rank_sizes: Sequence[WorkerSizes], disk_folder: str) -> StartedRank:
        """Start rank 0, with a KV cache that is limited by the rank with the least room."""
        sizes = smallest(each.cache for each in rank_sizes)
        return self._call(lambda: self._worker.start(sizes, disk_folder, self._movers.take))

    def _merge_ranks(
        self, rank: StartedRank, rank_sizes: Sequence[WorkerSizes], mover_ports: Sequence[int | None]
    ) -> StartedRanks:
        """Return what all ranks have in common. `rank` is rank 0; sizes and ports are by rank."""
        config, worker = self._config, self._worker
        ports = tuple(port for port in mover_ports if port is not None)
        block_bytes = sum(each.block_bytes for each in rank_sizes)
        transfer = KvTransfer(fingerprint=rank.fingerprint, ports=ports, block_bytes=block_bytes) if ports else None
        return StartedRanks(
            description=rank.description,
            model_config=worker.model_config,
            max_model_len=rank.max_model_len,
            max_num_seqs=smallest(each.cache for each in rank_sizes).max_num_seqs,
            eos_token_ids=frozenset(worker.model_config.eos_token_ids),
            cache_groups=rank.cache_groups,
            step_costs=rank.step_costs.of_stages(config.parallel.pipeline_parallel_size),
            on_gpu=worker.device.type == "cuda",
            replays_decodes=worker.device.type == "cuda" and not config.enforce_eager,
            host_tier=host_tier(config, rank_sizes, worker.device.type, rank.load_rate),
            mover=self._movers if config.kv_tiers.has_movers else None,
            kv_transfer=transfer,
            rank_sizes=rank_sizes,
        )

    def _send_to_movers(self, message: FromCore) -> None:
        self._worker.tiers.send(message)

    def _run_first_steps(self) -> None:
        """Run a request on the calling thread, which launches a GPU's steps.

        The warm-up ran on another thread, and cuBLAS allocates a handle and a workspace for each thread.
        """
        model, groups = self._worker.model_config, self.started.cache_groups
        max_num_tokens = min(self._config.max_num_batched_tokens, self.started.max_model_len - 1)
        if model.has_lm_head:
            plans = first_steps(groups, max_num_tokens=max_num_tokens)
        else:
            plans = first_pooled_steps(groups, model.pooling, max_num_tokens=max_num_tokens)
        for plan in plans:
            self.execute_model(plan)
            self.sample_tokens().result()

    def _call(self, job: Callable[[], T]) -> T:
        """Run a job on the device thread and wait until it ends or `fail` is called, as a hung device never ends it."""
        return self._failure.wait_for(self._device_thread.submit(job))

    def _execute(self, copies: Copies, inputs: StepInputs | None) -> None:
        runner = self._worker.model_runner
        self._worker.tiers.begin_step(copies, runner.memory)
        if inputs is not None:
            runner.execute_model(inputs)

    def _guarded(self, job: Callable[[], object]) -> None:
        """Run device work unless the executor has failed. An exception fails the executor."""
        if self._failure.has_happened:
            return
        try:
            job()
        except BaseException as error:
            self.fail(self._explain(error))

    def _explain(self, error: BaseException) -> str:
        return f"rank 0: {type(error).__name__}: {error}"

    def _resolve(self, future: "Future[ModelRunnerOutput]", inputs: StepInputs, masks: GrammarMasks | None) -> None:
        self._failure.finish_step(future, collect(self._worker.model_runner.sample_tokens(masks), inputs))

    def _launch_sampling(self, inputs: StepInputs, masks: GrammarMasks | None) -> StepFuture:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()
        try:
            return AsyncOutput(self._worker.model_runner.sample_tokens(masks), inputs, self._copy_stream)
        except BaseException as error:
            self.fail(self._explain(error))
            raise ExecutorFailed(self.failure) from error


@dataclass(frozen=True, slots=True)
class _SmallStepFuture:
    """StepFuture of a step that the waiting thread computes."""

    future: "Future[ModelRunnerOutput]"
    job: "Future[None]"  # resolves `future`
    thread: DeviceThread

    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.future.done():
            self.thread.help(self.job)
        return self.future.result(timeout)
