"""What an engine says of itself: the answer to GetModelInfo and the body of Hello, without protobuf."""

import secrets
from dataclasses import dataclass
from importlib.metadata import version

from proa.blocks import BLOCK_HASH_VERSION
from proa_engine.config import EngineConfig
from proa_engine.engine_parts import EngineParts

BUILTIN_NAME = "proa-builtin"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model and the limits, fixed once it is loaded."""

    instance_id: str  # drawn at each start of the engine
    model_name: str
    model: str
    revision: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_gpu_blocks: int
    block_hash_version: int
    tokenizer_digest: str  # empty: there is no tokenizer
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    max_waiting_requests: int
    prefix_caching: bool
    engine_version: str


def served_name(config: EngineConfig) -> str:
    return config.served_model_name or (BUILTIN_NAME if config.model == "builtin" else config.model)


def make_model_info(parts: EngineParts, *, tokenizer_digest: str) -> ModelInfo:
    config = parts.config
    return ModelInfo(
        instance_id=secrets.token_hex(8),
        model_name=served_name(config),
        model=config.model,
        revision=config.revision or "",
        max_model_len=parts.limits.max_model_len,
        vocab_size=parts.limits.vocab_size,
        block_size=config.block_size,
        num_gpu_blocks=parts.executor.num_gpu_blocks,
        block_hash_version=BLOCK_HASH_VERSION,
        tokenizer_digest=tokenizer_digest,
        eos_token_ids=tuple(sorted(parts.executor.eos_token_ids)),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logprobs=config.max_logprobs,
        max_waiting_requests=config.max_waiting_requests,
        prefix_caching=config.enable_prefix_caching,
        engine_version=version("proa-engine"),
    )
