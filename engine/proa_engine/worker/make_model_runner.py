"""make_model_runner: a ModelRunner and the memory that it uses, from a plan and the loaded model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from proa.contract import PoolingTask
from proa_engine.config import EngineConfig
from proa_engine.core.speculation import WAYS
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory.cache_plan import CacheMemory, CachePlan, allocate_caches
from proa_engine.memory.kv_cache import CacheSizes, num_kept_tokens, num_parameters
from proa_engine.models.base import AudioReader, CausalLM, CrossReader, ImageReader, move_weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.drafters.base import BlockDrafter, HiddenDrafter, NoDrafter
from proa_engine.models.pooling_heads import PoolingHeads
from proa_engine.observability.worker_spans import NoWorkerTracer, WorkerTracer
from proa_engine.ranks.stage_links import NoLinks, StageLinks
from proa_engine.step.audio import AlignmentColumns, AudioColumns, AudioWriter
from proa_engine.step.block_drafts import BlockDrafts
from proa_engine.step.columns import Columns
from proa_engine.step.decode_graphs import DecodeGraphs, GraphShape
from proa_engine.step.device_thread import SMALL_STEP, SmallSteps
from proa_engine.step.drafts import NgramDrafts
from proa_engine.step.hidden_drafts import HiddenDraftOptions, HiddenDrafts, LayerDrafts
from proa_engine.step.image_attention import attention_columns
from proa_engine.step.input_batch import InputBatch
from proa_engine.step.logprobs import PromptLogprobColumns
from proa_engine.step.loras import LoraAdapters, LoraColumns
from proa_engine.step.media import (
    AUDIO_DIMS,
    IMAGE_DIMS,
    EncodedMedia,
    MediaColumns,
    MediaEncoder,
    MediaEncodings,
    PixelEncoder,
    SampleEncoder,
)
from proa_engine.step.model_runner import ModelRunner, WholeModel
from proa_engine.step.pipeline import StageIO, make_stage_io
from proa_engine.step.pooling import PoolingColumns
from proa_engine.step.prompt_embeds import PromptEmbedsColumns
from proa_engine.step.prompt_graphs import PromptGraphs, PromptShape
from proa_engine.step.sampling import SamplingColumns
from proa_engine.step.slots import SlotTables
from proa_engine.step.states import StateColumns


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and the types in which a rank computes."""

    device: torch.device
    dtype: torch.dtype  # of weights and activations
    cache_dtype: torch.dtype
    parallel: ParallelContext
    links: StageLinks = field(default_factory=NoLinks)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A rank's share of a model. `config.max_position_embeddings` is at least the engine's `max_model_len`."""

    config: ModelConfig
    model: CausalLM
    heads: PoolingHeads
    loras: LoraAdapters | None  # None: requests have no adapters
    drafter: HiddenDrafter | BlockDrafter | NoDrafter

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        """What each layer keeps on this rank: of the model, then of the drafter."""
        return (*self.model.cache_layers(), *self.drafter.cache_layers())

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield each weight of the model and of the drafter once."""
        yield from {id(each): each for part in (self.model, self.drafter) for each in part.parameters()}.values()

    def move_to(self, device: torch.device) -> None:
        move_weights(self, device)
        move_weights(self.heads, device)


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """What a rank's runner is made of beside the model: the same after each sleep."""

    config: EngineConfig  # with the `max_num_seqs` that the memory has room for
    placement: Placement
    caches: CachePlan
    sizes: CacheSizes
    tracer: WorkerTracer | NoWorkerTracer
    shapes: Sequence[GraphShape] = ()  # of the steps to capture as graphs
    prompt_shapes: Sequence[PromptShape] = ()

    @property
    def num_graphs(self) -> int:
        return len(self.shapes) + len(self.prompt_shapes)


def describe(model: ModelConfig, placement: Placement, quantization: str | None) -> str:
    """Return what the model is, the types of its weights and activations, and the device."""
    dtype = str(placement.dtype).removeprefix("torch.") + (f" ({quantization})" if quantization else "")
    if placement.cache_dtype != placement.dtype:
        dtype += f", KV cache {str(placement.cache_dtype).removeprefix('torch.')}"
    device = placement.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{model.architecture}, {dtype}, {name}"


def make_model_runner(plan: RunnerPlan, loaded: LoadedModel) -> ModelRunner:
    """Allocate the KV cache, the tables of requests and the columns of the features that the configuration enables. No
    graph is captured yet."""
    config, placement, sizes, shapes = plan.config, plan.placement, plan.sizes, plan.shapes
    model, model_config, device = loaded.model, loaded.config, placement.device
    memory = allocate_caches(
        loaded.cache_layers(),
        plan.caches,
        sizes.num_blocks,
        placement.cache_dtype,
        device,
        num_state_slots=sizes.num_state_slots,
        kept_tokens=(config.max_num_seqs, num_kept_tokens(config)),
        whole_blocks=sizes.num_host_pages > 0,
    )
    memory.divide(len(model.cache_layers()))
    max_logprobs = config.num_top_logprobs(model_config.vocab_size)
    batch = _make_batch(plan, loaded, memory, max_logprobs)
    stage: StageIO = WholeModel()
    if model_config.stage.count > 1:
        stage = make_stage_io(
            model,
            model_config.stage,
            placement.links,
            max_graph_tokens=max((shape.num_tokens for shape in shapes), default=0),
            example=torch.empty(0, model_config.hidden_size, dtype=placement.dtype, device=device),
        )
    return ModelRunner(
        model,
        memory,
        batch,
        max_logprobs=max_logprobs,
        parallel=placement.parallel,
        stage=stage,
        graphs=DecodeGraphs(shapes, device, has_states=bool(plan.caches.state_bytes)),
        prompt_graphs=PromptGraphs(plan.prompt_shapes, batch.tables),
        small_steps=SmallSteps(SMALL_STEP // num_parameters(model_config)) if device.type == "cpu" else None,
        tracer=plan.tracer,
    )


def _make_batch(plan: RunnerPlan, loaded: LoadedModel, memory: CacheMemory, max_logprobs: int) -> InputBatch:
    config, placement = plan.config, plan.placement
    model, model_config, images = loaded.model, loaded.config, loaded.config.images
    tables = SlotTables(
        max_num_seqs=config.max_num_seqs,
        max_model_len=model_config.max_position_embeddings,
        block_size=config.block_size,
        vocab_size=model_config.vocab_size,
        device=placement.device,
        num_tables=1 + len(plan.caches.windows),
        has_position_deltas=images is not None and images.has_three_positions,
    )
    sampling = SamplingColumns(tables, model_config.eos_token_ids)
    features: list[Columns] = [PromptLogprobColumns(tables, model.compute_logits, max_logprobs)]
    if model_config.pooling.kinds:
        features.append(PoolingColumns(tables, model_config.pooling, model, loaded.heads, model_config.hidden_size))
    encoders = _encoders(model, model_config)
    if encoders and model_config.stage.is_first:
        encodings = MediaEncodings(encoders, placement.dtype, placement.device, placement.parallel)
        features.append(EncodedMedia(tables, encodings))
    elif images is not None:
        features.append(MediaColumns(tables))
    if images is not None:
        features += attention_columns(tables, images)
    if model_config.audios and model_config.audios.input.cross_attention:
        assert isinstance(model, CrossReader)
        writer = AudioWriter(
            model,
            model_config.audios,
            memory.layers,
            config.block_size,
            placement.dtype,
            placement.device,
            placement.parallel,
        )
        audio = AudioColumns(tables, writer, plan.caches.cross_tokens)
        features.append(audio)
        if PoolingTask.ALIGN in model_config.pooling.kinds:
            heads = model_config.audios.alignment_heads
            features.append(AlignmentColumns(tables, audio.tables, model, memory.layers, heads, placement.parallel))
    if config.enable_prompt_embeds and model_config.stage.is_first:
        features.append(PromptEmbedsColumns(tables, model_config.hidden_size, placement.dtype))
    if config.drafter:
        options = HiddenDraftOptions(
            max_drafts=config.num_speculative_tokens,
            ways=WAYS[config.drafter.draft_sample_method],
            params=sampling.params,
            state_size=model_config.hidden_size,
            dtype=placement.dtype,
        )
        features.append(_drafts(tables, loaded.drafter, memory.drafter_layers, options))
    elif config.speculative_config is not None:
        features.append(NgramDrafts(tables, config.speculative_config))
    if plan.caches.state_bytes:
        features.append(StateColumns(tables, num_kept_tokens(config)))
    if loaded.loras is not None:
        features.append(LoraColumns(tables, loaded.loras))
    return InputBatch(tables, sampling, features)


def _drafts(
    tables: SlotTables,
    drafter: HiddenDrafter | BlockDrafter | NoDrafter,
    caches: Sequence[LayerCache],
    options: HiddenDraftOptions,
) -> HiddenDrafts:
    if isinstance(drafter, BlockDrafter):
        return BlockDrafts(tables, drafter, caches, options)
    assert not isinstance(drafter, NoDrafter), "it was found and loaded"
    return LayerDrafts(tables, drafter, caches, options)


def _encoders(model: CausalLM, config: ModelConfig) -> dict[int, MediaEncoder]:
    """The encoders of what has tokens in prompts, as `MediaEncodings` takes them."""
    encoders: dict[int, MediaEncoder] = {}
    if config.images and isinstance(model, ImageReader):
        encoders[IMAGE_DIMS] = PixelEncoder(model.image_encoder, config.images)
    if config.audios and not config.audios.input.cross_attention:
        assert isinstance(model, AudioReader)
        encoders[AUDIO_DIMS] = SampleEncoder(model.audio_encoder, config.audios)
    return encoders
