"""make_model_runner: a ModelRunner and the memory that it uses, from an engine's configuration."""

import torch

from proa_engine.config import EngineConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.base import CausalLM, ImageReader
from proa_engine.models.config import ModelConfig
from proa_engine.models.pooling_heads import PoolingHeads
from proa_engine.worker.cache_memory import allocate_caches
from proa_engine.worker.cache_plan import CachePlan
from proa_engine.worker.decode_graphs import DecodeGraphs, GraphShape
from proa_engine.worker.drafter import Drafter
from proa_engine.worker.image_encodings import ImageEncodings
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.kv_cache import CacheSizes, num_parameters
from proa_engine.worker.lora_adapters import LoraAdapters
from proa_engine.worker.model_runner import ModelRunner
from proa_engine.worker.pooler import Pooler
from proa_engine.worker.small_steps import SMALL_STEP, SmallSteps
from proa_engine.worker_spans import WorkerTracer


def make_model_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    model: CausalLM,
    heads: PoolingHeads,
    *,
    parallel: ParallelContext,
    max_model_len: int,
    plan: CachePlan,
    sizes: CacheSizes,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    shapes: list[GraphShape],
    loras: LoraAdapters | None = None,
    tracer: WorkerTracer | None = None,
) -> ModelRunner:
    """Allocate the KV cache, the input batch and what the configuration needs beside them."""
    caches = allocate_caches(
        model.cache_layers(), plan, sizes.num_blocks, cache_dtype, device, num_state_slots=sizes.num_state_slots
    )
    batch = InputBatch(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        device=device,
        max_drafts=config.num_speculative_tokens,
        num_tables=1 + len(plan.windows),
        has_states=plan.state_bytes > 0,
        loras=loras,
        pooling_kinds=model_config.pooling.kinds,
        image_config=model_config.images,
    )
    sums: torch.Tensor | None = None
    if model_config.pooling.needs_sums:
        sums = torch.zeros(config.max_num_seqs, model_config.hidden_size, device=device)
    encodings: ImageEncodings | None = None
    if model_config.images is not None:
        assert isinstance(model, ImageReader)
        encodings = ImageEncodings(model.image_encoder, model_config.images, dtype, device, parallel)
    return ModelRunner(
        model,
        caches,
        batch,
        max_logprobs=config.num_top_logprobs(model_config.vocab_size),
        parallel=parallel,
        graphs=DecodeGraphs(shapes, device, has_states=batch.states is not None) if shapes else None,
        drafter=Drafter(config.speculative_config, batch) if config.speculative_config else None,
        small_steps=SmallSteps(SMALL_STEP // num_parameters(model_config)) if device.type == "cpu" else None,
        pooler=Pooler(model, heads, sums),
        encodings=encodings,
        tracer=tracer,
    )
