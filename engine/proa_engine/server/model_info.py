"""The engine's ModelInfo, from its configuration and its loaded model."""

from importlib.metadata import version

from proa.blocks import BLOCK_HASH_VERSION
from proa.contract import CheckpointRule, ModelInfo, PoolingTask
from proa_engine.core.cache_groups import CacheGroups
from proa_engine.engine_parts import EngineParts


def make_model_info(parts: EngineParts, *, tokenizer_digest: str) -> ModelInfo:
    config = parts.config
    return ModelInfo(
        model_name=config.model_name,
        model=config.model,
        revision=config.revision or "",
        max_model_len=parts.limits.lengths.max_model_len,
        vocab_size=parts.limits.vocab_size,
        block_size=config.block_size,
        num_gpu_blocks=parts.executor.cache_groups.num_blocks,
        block_hash_version=BLOCK_HASH_VERSION,
        tokenizer_digest=tokenizer_digest,
        eos_token_ids=tuple(sorted(parts.executor.eos_token_ids)),
        max_num_seqs=parts.executor.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logprobs=parts.limits.max_logprobs,
        max_waiting_requests=config.max_waiting_requests,
        prefix_caching=config.enable_prefix_caching and not parts.executor.model_config.is_encoder,
        grammars=parts.limits.grammars,
        model_type=parts.executor.model_config.model_type,
        max_loras=parts.limits.max_loras,
        images=parts.limits.images,
        engine_version=version("proa-engine"),
        pooling_tasks=tuple(sorted(parts.limits.pooling_tasks)),
        pooling_only=parts.limits.pooling_only,
        embedding_size=parts.limits.embedding_size,
        labels=parts.executor.model_config.pooling.labels,
        checkpoint_rule=_checkpoint_rule(parts.executor.cache_groups),
        max_embed_len=_max_embed_len(parts),
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
