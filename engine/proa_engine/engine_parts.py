"""From a config to an engine that can step: the executor, the core over it, and the limits of the model.

Both front doors start here. Loading brings torch with it, so that is imported only when something is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from proa.blocks import hash_block, root_hash
from proa_engine.config import EngineConfig
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.executor import Executor
from proa_engine.core.factory import make_core
from proa_engine.core.validation import ModelLimits


class ModelFacts(Protocol):
    @property
    def vocab_size(self) -> int: ...


class LoadedExecutor(Executor, Protocol):
    """An executor with its model in memory, and what is known only then."""

    @property
    def model_config(self) -> ModelFacts: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_gpu_blocks(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def longest_warm_up_step(self) -> float:
        """Seconds, of a step of the full token budget."""
        ...

    @property
    def failure(self) -> str | None:
        """Why no step can be run any more; None while all is well."""
        ...

    def fail(self, reason: str) -> None:
        """Give up, from any thread: all that wait for a step raise ExecutorFailed."""
        ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine in this process. `tokenizer_folder` holds the tokenizer's files; None: token ids alone."""

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
    """Load the model and build the engine; its core steps what `trace_steps` makes of the executor.

    Raises `ValueError` with a sentence for the user where that cannot be.
    """
    from proa_engine.executor import make_executor
    from proa_engine.models.loader import resolve_model

    executor = make_executor(config, report)
    if config.skip_tokenizer_init:
        return assemble_engine(config, executor, None, trace_steps)
    folder = resolve_model(config.tokenizer or config.model, config.revision, config.load_format)
    return assemble_engine(config, executor, folder, trace_steps)


def assemble_engine(
    config: EngineConfig,
    executor: LoadedExecutor,
    tokenizer_folder: Path | None,
    trace_steps: Callable[[Executor], Executor] = untraced,
) -> EngineParts:
    """An engine over an executor that has loaded its model."""
    core = make_core(
        trace_steps(executor),
        hash_block=hash_block,
        root_hash=root_hash(config.model, config.revision or ""),
        num_gpu_blocks=executor.num_gpu_blocks,
        block_size=config.block_size,
        max_model_len=executor.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting_requests=config.max_waiting_requests,
        eos_token_ids=frozenset(executor.eos_token_ids),
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.async_scheduling,
        scheduling_policy=config.scheduling_policy,
        num_speculative_tokens=config.num_speculative_tokens,
    )
    limits = ModelLimits(
        vocab_size=executor.model_config.vocab_size,
        max_model_len=executor.max_model_len,
        max_logprobs=config.max_logprobs,
    )
    return EngineParts(config, executor, core, limits, tokenizer_folder)
