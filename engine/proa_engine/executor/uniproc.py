"""UniProcExecutor: the one rank there is, in the engine's own process."""

from collections.abc import Callable

from proa_engine.config import EngineConfig
from proa_engine.core.executor import StepFuture
from proa_engine.core.types import SchedulerOutput
from proa_engine.worker.local_rank import LocalRank
from proa_engine.worker.worker import Worker, WorkerSizes


class UniProcExecutor:
    """Rank 0 and what the engine wants to know of it. The constructor returns when steps may come.

    After a failure every call and every future raises ExecutorFailed.
    """

    def __init__(self, config: EngineConfig, report: Callable[[str], None]) -> None:
        spawns = config.tensor_parallel_size > 1 and not config.worker_sockets
        self._worker = Worker(config, 0, report, ranks_here=config.tensor_parallel_size if spawns else 1)
        self._local = LocalRank(self._worker, explain=self._explain, on_failure=report)
        self._report = report
        self.block_size = config.block_size
        self.num_gpu_blocks = 0
        self.rank_sizes: list[WorkerSizes] = []  # by rank
        try:
            self._bring_up(config)
        except BaseException:
            self.shutdown()
            raise
        self.model_config = self._worker.model_config
        self.max_model_len = self._worker.max_model_len
        self.eos_token_ids = frozenset(self.model_config.eos_token_ids)
        self.longest_warm_up_step = self._worker.longest_step_seconds  # scaled to a step of the full token budget

    @property
    def failure(self) -> str | None:
        """Why no step can be run any more; None while all is well."""
        return self._local.failure

    def is_alive(self) -> bool:
        return self._local.failure is None

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._local.execute_model(scheduler_output)

    def sample_tokens(self) -> StepFuture:
        return self._local.sample_tokens()

    def fail(self, reason: str) -> None:
        """Give up, from any thread: all that wait for a step raise ExecutorFailed with this reason."""
        self._local.fail(reason)

    def shutdown(self) -> None:
        """Finish what was started and let everything go. May be called twice."""
        self._local.shutdown()

    def _bring_up(self, config: EngineConfig) -> None:
        self._local.call(self._worker.init_device)
        self._start([self._local.call(self._worker.load_model)])

    def _start(self, rank_sizes: list[WorkerSizes]) -> None:
        self.rank_sizes = rank_sizes
        self.num_gpu_blocks = min(sizes.num_blocks for sizes in rank_sizes)
        self._local.call(lambda: self._worker.start(self.num_gpu_blocks))
        tokens = self.num_gpu_blocks * self.block_size
        self._report(f"KV cache: {self.num_gpu_blocks} blocks, {tokens} tokens")

    def _explain(self, error: BaseException) -> str:
        return f"rank 0: {type(error).__name__}: {error}"
