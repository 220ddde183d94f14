"""LoadedEngine: what the server needs of an engine once its model is loaded."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Protocol, TypeVar

from proa.blocks import BLOCK_HASH_VERSION
from proa.contract import CheckpointRule, EngineCoreRequest, LoadedLoras, ModelInfo, PoolingTask, Role, SchedulerStats
from proa_engine.config import EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.operations import Operation
from proa_engine.core.types import StepOutputs
from proa_engine.engine_parts import EngineParts
from proa_engine.observability.metrics import EngineMetrics
from proa_engine.observability.telemetry import EngineTracer, NoEngineTracer
from proa_engine.server.kv_events import KvEventSource

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestObserver:
    tracer: EngineTracer | NoEngineTracer
    metrics: EngineMetrics

    def on_request(self, request: EngineCoreRequest) -> dict[str, str]:
        """Start the request's span. Returns the trace headers that name it, empty if the trace is not sampled."""
        self.metrics.observe_request(request)
        return self.tracer.start_request(request)

    def on_outputs(self, outputs: StepOutputs) -> None:
        self.metrics.observe_outputs(outputs)
        self.tracer.observe_outputs(outputs.outputs)

    def on_refused(self, reason: str) -> None:
        """Count a request that was refused before `on_request`."""
        self.metrics.observe_rejection(reason)

    def on_rejected(self, request_id: str, reason: str, message: str) -> None:
        """Count a request that the core rejected, and end its span."""
        self.metrics.observe_rejection(reason, request_id)
        self.tracer.end_request(request_id, reason, message)


class Retained(Protocol):
    def num_blocks_of(self, owner: int) -> int: ...


class Core(KvEventSource, Protocol):
    """The part of `EngineCore` that the router calls. Every method is thread-safe."""

    def submit(self, request: EngineCoreRequest) -> None: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    def operate(self, operation: Operation[T]) -> "Future[T]": ...

    def stats(self) -> SchedulerStats: ...

    @property
    def retention(self) -> Retained: ...

    @property
    def step_started_at(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that can take requests. `validate` raises ValueError for a request that its model cannot serve."""

    core: Core
    info: ModelInfo
    config: EngineConfig
    tokenizer_files: Sequence[tuple[str, bytes]]
    validate: Callable[[EngineCoreRequest], None]
    observer: RequestObserver
    loras: LoadedLoras = field(default_factory=LoadedLoras)  # loaded before the first step
    instance_id: str = field(default_factory=lambda: secrets.token_hex(8))  # new at each start of the engine


def make_model_info(parts: EngineParts, *, tokenizer_digest: str) -> ModelInfo:
    config, started = parts.config, parts.executor.started
    return ModelInfo(
        model_name=config.model_name,
        aliases=config.model_aliases,
        model=config.model,
        revision=config.revision or "",
        max_model_len=parts.limits.lengths.max_model_len,
        vocab_size=parts.limits.vocab_size,
        block_size=config.block_size,
        num_gpu_blocks=started.cache_groups.num_blocks,
        block_hash_version=BLOCK_HASH_VERSION,
        tokenizer_digest=tokenizer_digest,
        eos_token_ids=tuple(sorted(started.eos_token_ids)),
        max_num_seqs=started.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logprobs=parts.limits.max_logprobs,
        max_waiting_requests=config.max_waiting_requests,
        prefix_caching=config.enable_prefix_caching and not started.model_config.is_encoder,
        grammars=parts.limits.grammars,
        model_type=started.model_config.model_type,
        max_loras=parts.limits.max_loras,
        images=parts.limits.images,
        audios=parts.limits.audios,
        prompt_embeds_size=parts.limits.prompt_embeds_size,
        engine_version=version("proa-engine"),
        pooling_tasks=tuple(sorted(parts.limits.pooling_tasks)),
        pooling_only=parts.limits.pooling_only,
        embedding_size=parts.limits.embedding_size,
        labels=started.model_config.pooling.labels,
        checkpoint_rule=_checkpoint_rule(started.cache_groups),
        max_embed_len=_max_embed_len(parts),
        num_host_blocks=0 if started.host_tier is None else started.host_tier.num_pages,
        kv_transfer=started.kv_transfer,
        role=Role[config.kv_tiers.role.upper()],
        session_claims=True,
    )


def _max_embed_len(parts: EngineParts) -> int:
    config = parts.config.pooler_config
    if config is None or PoolingTask.EMBED not in parts.limits.pooling_tasks:
        return 0
    return config.max_embed_len or 0


def _checkpoint_rule(groups: CacheGroups) -> CheckpointRule | None:
    if not groups.has_checkpoints:
        return None
    return CheckpointRule(interval=groups.checkpoint_interval, min_junction=groups.min_junction)
