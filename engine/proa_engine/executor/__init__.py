"""Executors: run the scheduler's outputs on the workers. Torch is imported only after the thread count is set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from proa.imports import importing
from proa_engine.config import EngineConfig
from proa_engine.memory.host import set_thread_variables
from proa_engine.worker.compile_pool import CompilePool, begin_compile_pool, use_compile_cache

if TYPE_CHECKING:
    from proa_engine.executor.uniproc import UniProcExecutor


def make_executor(config: EngineConfig, log: Callable[[str], None]) -> "UniProcExecutor":
    """Load the model on all ranks, size the KV cache and warm up. Returns when the executor can run steps.

    `log` is called with lines about the progress. Raises `ValueError` if the configuration cannot work on this machine,
    and `ExecutorFailed` if a rank fails while starting.
    """
    return prepare_executor(config)(log)


def prepare_executor(config: EngineConfig) -> "Callable[[Callable[[str], None]], UniProcExecutor]":
    """The first part of `make_executor`, which imports torch, while the compile pool begins. Call the result with `log`
    for the rest. Raises `ValueError`."""
    if config.parallel.node_rank:
        raise ValueError(
            f"node_rank must be 0 for an engine: node {config.parallel.node_rank} is run by `proa-engine serve`"
        )
    set_thread_variables(config.parallel.ranks_per_node)
    use_compile_cache(config)
    compile_pool = begin_compile_pool(config)
    with _closed_on_error(compile_pool), importing():
        executor = _executor_class(config)

    def start(log: Callable[[str], None]) -> "UniProcExecutor":
        with _closed_on_error(compile_pool):
            return executor(config, log, compile_pool)

    return start


@contextmanager
def _closed_on_error(compile_pool: CompilePool | None) -> Iterator[None]:
    """Close the pool if an exception leaves the context."""
    try:
        yield
    except BaseException:
        if compile_pool is not None:
            compile_pool.close()
        raise


def _executor_class(config: EngineConfig) -> "type[UniProcExecutor]":
    if config.parallel.num_ranks == 1:
        from proa_engine.executor.uniproc import UniProcExecutor

        return UniProcExecutor
    from proa_engine.executor.multiproc import MultiProcExecutor

    return MultiProcExecutor
