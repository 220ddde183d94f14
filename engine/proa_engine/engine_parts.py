"""Build an engine from its configuration: load the model into an executor, and make the core that steps it.

The server and the offline `LLMEngine` both start here. Torch is imported only when a model is loaded.
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


class LoadedModelConfig(Protocol):
    @property
    def vocab_size(self) -> int: ...


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
    """Build an engine on an executor that has loaded its model."""
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
