"""UniProcExecutor: runs rank 0 in the engine's process. It owns the thread of the steps, their futures and the
failure."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from importlib.metadata import version
from threading import Lock
from typing import Any, TypeVar

import torch

from proa.contract import KvTransfer
from proa_engine.config import EngineConfig
from proa_engine.core.executor import ExecutorFailed, StepFuture
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.core.types import Copies, ModelRunnerOutput, SchedulerOutput
from proa_engine.executor.movers import RankMovers
from proa_engine.memory.kv_cache import WorkerSizes, smallest
from proa_engine.mover.messages import FromCore, ToCore
from proa_engine.observability.progress import gigabytes
from proa_engine.step.async_output import AsyncOutput, collect
from proa_engine.step.device_thread import DeviceThread, run_beside_steps, within
from proa_engine.step.step_inputs import StepInputs
from proa_engine.worker.compile_pool import CompilePool, start_compile_pool
from proa_engine.worker.warmup_steps import first_pooled_steps, first_steps
from proa_engine.worker.worker import Worker

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
        self.cache_groups: CacheGroups  # set by `_start`, as are the next two
        self.host_tier: HostTierConfig | None
        self.max_num_seqs: int
        self.rank_sizes: list[WorkerSizes] = []  # by rank
        self.kv_transfer: KvTransfer | None = None  # set by `_start_worker`, if movers listen
        self.mover: RankMovers | None = None
        if config.kv_tiers.has_movers:  # before any of them starts, because it sends messages at once
            adopts = config.kv_tiers.kv_offloading_path is not None
            self.mover = RankMovers(self._send_to_movers, config.parallel.num_ranks, adopts=adopts)
        self._worker = Worker(config, 0, log, ranks_here=config.parallel.ranks_here)
        self._log = log
        self._compile_pool = compile_pool
        self._device_thread = DeviceThread("proa-device")
        self._lock = Lock()
        self._failed: Future[str] = Future()  # resolves to the reason
        self._pending: set[Future[ModelRunnerOutput]] = set()
        self._inputs: StepInputs | None = None  # inputs of the step that is executed and not yet sampled
        self._copy_stream: torch.cuda.Stream | None = None
        # A waiting thread that computes a step cannot see another rank's failure.
        self._may_help = config.parallel.num_ranks == 1
        try:
            self._start(config)
            self._run_first_steps(min(config.max_num_batched_tokens, self._worker.max_model_len - 1))
        except BaseException:
            self.shutdown()
            raise
        self.model_config = self._worker.model_config
        self.max_model_len = self._worker.max_model_len
        self.eos_token_ids = frozenset(self.model_config.eos_token_ids)
        self.replays_decodes = self._worker.device.type == "cuda" and not config.enforce_eager
        self.step_costs = self._worker.step_costs.of_stages(config.parallel.pipeline_parallel_size)
        self._log(f"proa-engine {version('proa-engine')} with {config.model_name}: {self._describe()}")

    @property
    def failure(self) -> str | None:
        """Why the executor failed; None if it has not."""
        return self._failed.result() if self._failed.done() else None

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._check()
        copies = scheduler_output.copies
        self._inputs = inputs = self._worker.model_runner.prepare_inputs(scheduler_output)
        if inputs is None and not copies:
            return
        if self._worker.device.type == "cuda":
            torch.cuda.set_device(self._worker.device)
            self._guarded(lambda: self._execute(copies, inputs))
        else:
            wake = inputs is None or not (inputs.is_small and self._may_help)
            self._device_thread.submit(lambda: self._guarded(lambda: self._execute(copies, inputs)), wake=wake)

    def sample_tokens(self, masks: GrammarMasks | None = None) -> StepFuture:
        """Sample the step that `execute_model` started. `masks` are read until the future is done."""
        self._check()
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            future: Future[ModelRunnerOutput] = Future()
            future.set_result(_EMPTY_OUTPUT)
            return future
        return self._start_sampling(inputs, masks)

    def _start_sampling(self, inputs: StepInputs, masks: GrammarMasks | None) -> StepFuture:
        """Sample the oldest step that is executed and not sampled, which has these inputs."""
        self._check()
        future: Future[ModelRunnerOutput] = Future()
        if self._worker.device.type == "cuda":
            return self._launch_sampling(inputs, masks)
        with self._lock:
            self._pending.add(future)
        is_small = inputs.is_small and self._may_help
        job = self._device_thread.submit(
            lambda: self._guarded(lambda: self._resolve(future, inputs, masks)), wake=not is_small
        )
        return _SmallStepFuture(future, job, self._device_thread) if is_small else future

    def fail(self, reason: str) -> None:
        """Make all current and later calls and futures raise ExecutorFailed. Thread-safe; the first reason is kept."""
        with self._lock:
            if self._failed.done():
                return
            self._failed.set_result(reason)
            pending, self._pending = self._pending, set()
        for future in pending:
            future.set_exception(ExecutorFailed(reason))
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
        return self._read_lora(lora_id, path, lambda: self._worker.load_lora(lora_id, path))

    def unload_lora(self, lora_id: int) -> None:
        self._worker.unload_lora(lora_id)

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

    def _start(self, config: EngineConfig) -> None:
        compile_pool = self._call(lambda: start_compile_pool(config, 0, self._compile_pool))
        self._call(self._worker.init_device)
        sizes = self._call(lambda: self._worker.load_model(compile_pool))
        self._call(self._worker.take_disk_folder)
        self._start_worker([sizes])

    def _start_worker(self, rank_sizes: list[WorkerSizes]) -> None:
        """Allocate the KV cache, limited by the rank with the least room, and warm up."""
        self.rank_sizes = rank_sizes
        sizes = smallest(each.cache for each in rank_sizes)
        self._call(lambda: self._worker.start(sizes))
        self.max_num_seqs = sizes.max_num_seqs
        self.cache_groups = self._worker.cache_groups(sizes)
        self.host_tier = self._worker.host_tier(rank_sizes)
        self._start_mover([each.block_bytes for each in rank_sizes])

    def _start_mover(self, block_bytes: list[int]) -> None:
        """Start rank 0's mover, and describe all. `block_bytes`: of one block, by rank."""
        mover = self._call(lambda: self._worker.start_mover(self._on_mover))
        if mover is None or mover.port is None:
            return
        self.kv_transfer = KvTransfer(
            fingerprint=self._worker.cache_fingerprint, ports=(mover.port,), block_bytes=sum(block_bytes)
        )

    def _on_mover(self, message: ToCore) -> None:
        assert self.mover is not None, "only an engine with movers starts them"
        self.mover.take(message)

    def _send_to_movers(self, message: FromCore) -> None:
        assert self._worker.mover is not None
        self._worker.mover.send(message)

    def _run_first_steps(self, max_num_tokens: int) -> None:
        """Run a request on the calling thread, which launches a GPU's steps.

        The warm-up ran on another thread, and cuBLAS allocates a handle and a workspace for each thread.
        """
        model = self._worker.model_config
        if model.has_lm_head:
            plans = first_steps(self.cache_groups, max_num_tokens=max_num_tokens)
        else:
            plans = first_pooled_steps(self.cache_groups, model.pooling, max_num_tokens=max_num_tokens)
        for plan in plans:
            self.execute_model(plan)
            self.sample_tokens().result()

    def _call(self, job: Callable[[], T]) -> T:
        """Run a job on the device thread and wait until it ends or `fail` is called, as a hung device never ends it."""
        return self._wait_for(self._device_thread.submit(job))

    def _wait_for(self, future: "Future[T]") -> T:
        """Return the future's result. Raises ExecutorFailed as soon as the executor fails."""
        either: tuple[Future[Any], ...] = (future, self._failed)
        wait(either, return_when=FIRST_COMPLETED)
        if not future.done():
            self._check()
        return future.result()

    def _describe(self) -> str:
        """Return what the model is and which memory it has, for the log."""
        ranks = f" x {len(self.rank_sizes)}" if len(self.rank_sizes) > 1 else ""
        weights = gigabytes(sum(sizes.weight_bytes for sizes in self.rank_sizes))
        cache = _describe_cache(self.cache_groups, self.host_tier, self.max_num_seqs, self.max_model_len)
        return f"{self._worker.describe()}{ranks}, {weights} GB of weights, {cache}"

    def _check(self) -> None:
        if self._failed.done():
            raise ExecutorFailed(self._failed.result())

    def _execute(self, copies: Copies, inputs: StepInputs | None) -> None:
        self._worker.begin_step(copies)
        if inputs is not None:
            self._worker.model_runner.execute_model(inputs)

    def _guarded(self, job: Callable[[], object]) -> None:
        """Run device work unless the executor has failed. An exception fails the executor."""
        if self._failed.done():
            return
        try:
            job()
        except BaseException as error:
            self.fail(self._explain(error))

    def _explain(self, error: BaseException) -> str:
        return f"rank 0: {type(error).__name__}: {error}"

    def _resolve(self, future: "Future[ModelRunnerOutput]", inputs: StepInputs, masks: GrammarMasks | None) -> None:
        output = collect(self._worker.model_runner.sample_tokens(masks), inputs)
        with self._lock:
            is_pending = future in self._pending
            self._pending.discard(future)
        if is_pending:
            future.set_result(output)

    def _launch_sampling(self, inputs: StepInputs, masks: GrammarMasks | None) -> StepFuture:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()
        try:
            return AsyncOutput(self._worker.model_runner.sample_tokens(masks), inputs, self._copy_stream)
        except BaseException as error:
            self.fail(self._explain(error))
            raise ExecutorFailed(self._failed.result()) from error


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


def _describe_cache(groups: CacheGroups, host: HostTierConfig | None, max_num_seqs: int, max_model_len: int) -> str:
    num_requests = groups.concurrency(max_model_len)
    text = f"KV cache of {int(num_requests * max_model_len):,} tokens, enough for {num_requests:.1f} requests of "
    text += f"{max_model_len:,} tokens"
    if groups.windows:
        text += f", {len(groups.windows)} tables of windows"
    if host is not None:
        text += f", {host.num_pages * groups.block_size:,} tokens in host memory"
    if groups.num_state_slots:
        text += f", {groups.num_state_slots} states, at most {max_num_seqs} requests at a time"
    return text
