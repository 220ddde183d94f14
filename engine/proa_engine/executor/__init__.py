"""Executors: carry the core's plans to the workers. `make_executor` chooses by the configuration.

Torch is imported on the first call, after the thread count is set.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from proa_engine.config import EngineConfig
from proa_engine.worker.host import limit_threads

if TYPE_CHECKING:
    from proa_engine.executor.uniproc import UniProcExecutor


def make_executor(config: EngineConfig, report: Callable[[str], None]) -> "UniProcExecutor":
    """Load the model on all ranks, size the KV cache and warm up; returns when steps may come.

    `report` hears of progress. Raises `ValueError` where the configuration cannot work on this machine, and
    `ExecutorFailed` where a rank goes down on the way.
    """
    limit_threads(config.tensor_parallel_size)
    if config.tensor_parallel_size == 1:
        from proa_engine.executor.uniproc import UniProcExecutor

        return UniProcExecutor(config, report)
    from proa_engine.executor.multiproc import MultiProcExecutor

    return MultiProcExecutor(config, report)
