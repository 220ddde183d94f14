"""Executors: run the scheduler's outputs on the workers. Torch is imported only after the thread count is set."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from proa_engine.config import EngineConfig
from proa_engine.worker.host import set_thread_variables

if TYPE_CHECKING:
    from proa_engine.executor.uniproc import UniProcExecutor


def make_executor(config: EngineConfig, log: Callable[[str], None]) -> "UniProcExecutor":
    """Load the model on all ranks, size the KV cache and warm up. Returns when the executor can run steps.

    `log` is called with lines about the progress. Raises `ValueError` if the configuration cannot work on this machine,
    and `ExecutorFailed` if a rank fails while starting.
    """
    set_thread_variables(config.tensor_parallel_size)
    if config.tensor_parallel_size == 1:
        from proa_engine.executor.uniproc import UniProcExecutor

        return UniProcExecutor(config, log)
    from proa_engine.executor.multiproc import MultiProcExecutor

    return MultiProcExecutor(config, log)
