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
from proa_engine.worker.drafts import DraftColumns
from proa_engine.worker.image_encodings import ImageEncodings
from proa_engine.worker.images import ImageColumns
from proa_engine.worker.input_batch import Features, InputBatch
from proa_engine.worker.kv_cache import CacheSizes, num_parameters
from proa_engine.worker.loras import LoraAdapters, LoraColumns
from proa_engine.worker.model_runner import ModelRunner
from proa_engine.worker.pooling import PoolingColumns
from proa_engine.worker.sampling import SamplingColumns
from proa_engine.worker.slots import SlotTables
from proa_engine.worker.small_steps import SMALL_STEP, SmallSteps
from proa_engine.worker.states import StateColumns
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
    """Allocate the KV cache, the tables of requests and the features that the configuration has."""
    caches = allocate_caches(
        model.cache_layers(), plan, sizes.num_blocks, cache_dtype, device, num_state_slots=sizes.num_state_slots
    )
    tables = SlotTables(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
        vocab_size=model_config.vocab_size,
        device=device,
        num_tables=1 + len(plan.windows),
    )
    images: ImageColumns | None = None
    if model_config.images is not None:
        assert isinstance(model, ImageReader)
        encodings = ImageEncodings(model.image_encoder, model_config.images, dtype, device, parallel)
        images = ImageColumns(tables, model_config.images, encodings)
    pooling, drafts = model_config.pooling, config.speculative_config
    features = Features(
        sampling=SamplingColumns(tables, model_config.eos_token_ids),
        pooling=PoolingColumns(tables, pooling, model, heads, model_config.hidden_size) if pooling.kinds else None,
        images=images,
        drafts=None if drafts is None else DraftColumns(tables, drafts),
        states=StateColumns(tables) if plan.state_bytes else None,
        loras=None if loras is None else LoraColumns(tables, loras),
    )
    return ModelRunner(
        model,
        caches,
        InputBatch(tables, features),
        max_logprobs=config.num_top_logprobs(model_config.vocab_size),
        parallel=parallel,
        graphs=DecodeGraphs(shapes, device, has_states=features.states is not None) if shapes else None,
        small_steps=SmallSteps(SMALL_STEP // num_parameters(model_config)) if device.type == "cpu" else None,
        tracer=tracer,
    )
