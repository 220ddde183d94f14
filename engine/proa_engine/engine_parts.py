"""Build an engine from its configuration: load the model into an executor, and make the core that steps it.

The server and the offline `LLMEngine` both start here. Torch is imported only when a model is loaded.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from proa.blocks import hash_block, root_hash
from proa_engine.config import EngineConfig
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.executor import Executor
from proa_engine.core.grammar import Grammars
from proa_engine.core.kv_cache_manager import KVCacheManager
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.validation import ModelLimits


class LoadedModelConfig(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def model_type(self) -> str: ...


class LoadedExecutor(Executor, Protocol):
    """An executor with its model in memory, and the properties of the two."""

    @property
    def model_config(self) -> LoadedModelConfig: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_gpu_blocks(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def longest_warm_up_step(self) -> float:
        """Duration in seconds of the longest warm-up step, which has the full token budget."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the executor cannot run steps any more; None while it can."""
        ...

    def fail(self, reason: str) -> None:
        """Stop running steps: everything that waits for one raises ExecutorFailed. Callable from any thread."""
        ...

    def make_host_buffer(self, num_bytes: int) -> memoryview:
        """Writable memory for masks, which the device reads without blocking the host; lives as long as its views."""
        ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine in this process. `tokenizer_folder` holds the tokenizer's files; None: no tokenizer."""

    config: EngineConfig
    executor: LoadedExecutor
    core: EngineCore
    limits: ModelLimits
    tokenizer_folder: Path | None


def untraced(executor: Executor) -> Executor:
    return executor


def load_engine(
    config: EngineConfig, report: Callable[[str], None], trace_steps: Callable[[Executor], Executor] = untraced
) -> EngineParts:
    """Load the model and build the engine.

    `report` is called with progress messages. `trace_steps` wraps the executor that the core steps. Raises
    `ValueError`, with a sentence for the user, for a model or configuration that cannot be loaded.

    Objects alive afterwards, which live as long as the engine, are excluded from garbage collection (`gc.freeze`).
    """
    from proa_engine.executor import make_executor
    from proa_engine.models.loader import resolve_model

    executor = make_executor(config, report)
    folder = None
    if not config.skip_tokenizer_init:
        folder = resolve_model(config.tokenizer or config.model, config.revision, config.load_format)
    parts = assemble_engine(config, executor, folder, trace_steps)
    gc.collect()
    gc.freeze()
    return parts


def assemble_engine(
    config: EngineConfig,
    executor: LoadedExecutor,
    tokenizer_folder: Path | None,
    trace_steps: Callable[[Executor], Executor] = untraced,
    grammars: Grammars | None = None,
) -> EngineParts:
    """Build an engine on an executor that has loaded its model. `grammars` None: it refuses grammars."""
    manager = KVCacheManager(
        num_blocks=executor.num_gpu_blocks,
        block_size=config.block_size,
        hash_block=hash_block if config.enable_prefix_caching else None,
        root_hash=root_hash(config.model, config.revision or ""),
    )
    scheduler = Scheduler(
        scheduler_config(config, executor.max_model_len),
        manager,
        eos_token_ids=frozenset(executor.eos_token_ids),
        grammars=grammars,
    )
    core = EngineCore(scheduler, trace_steps(executor))
    limits = ModelLimits(
        vocab_size=executor.model_config.vocab_size,
        max_model_len=executor.max_model_len,
        max_logprobs=config.num_top_logprobs(executor.model_config.vocab_size),
        grammars=grammars is not None,
    )
    return EngineParts(config, executor, core, limits, tokenizer_folder)


def scheduler_config(config: EngineConfig, max_model_len: int) -> SchedulerConfig:
    """The fields that the two configurations share, with the loaded model's context length."""
    shared = {field.name: getattr(config, field.name) for field in fields(SchedulerConfig)}
    return SchedulerConfig(**{**shared, "max_model_len": max_model_len})
