"""ModelConfig: a model's parameters, which `read_config` reads, and the configurations derived from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch

from proa_engine.layers.cache_layers import CrossLayer, LatentLayer
from proa_engine.layers.expert_split import ExpertSplit, split_experts
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.norm import LayerNormOptions, NormOptions
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import LinearMethod, Weights
from proa_engine.models.audio_config import AudioConfig, AudioEncoderOptions
from proa_engine.models.base import CausalLM
from proa_engine.models.decoder_layer import LayerDeclaration
from proa_engine.models.image_config import ImageConfig, ImageEncoderOptions
from proa_engine.models.image_files import AudioFiles, ImageFiles
from proa_engine.models.pooling_config import (
    PoolingConfig,
)
from proa_engine.models.stages import WHOLE, Stage, cut


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """An architecture's layers, and what is around them."""

    layers: tuple[LayerDeclaration, ...]
    norm: NormOptions | LayerNormOptions  # of the last layer's output
    embedding_scale: float = 1.0
    scales_prompt_embeds: bool = False  # whether embeddings in place of tokens are scaled, as in transformers
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None  # c: logits become c * tanh(logits / c)
    normalizes_head: bool = False  # the rows of the LM head are divided by their lengths
    num_first_stage_layers: int = 1  # layers that must be on the first pipeline stage, which has the images
    needs_token_ids: str = ""  # why each token needs an id beside its embedding; empty: none does
    num_positions: int = 0  # of a learned embedding; 0: the model has none
    undivided: str = ""  # what keeps the layers from being divided among pipeline stages; empty: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Parameters of a model. Sizes are full sizes, before sharding."""

    architecture: str
    is_encoder: bool  # whether a prompt is computed in one step, and nothing is cached
    is_adapted: bool  # whether `transformers` runs it
    model_type: str  # empty: config.json names none
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    decoder: DecoderOptions
    eos_token_ids: tuple[int, ...]
    torch_dtype: torch.dtype  # type of the unquantized weights on disk
    linear_method: LinearMethod  # how matrices are stored and multiplied
    multiplies_8_bits: bool  # most products are of 8-bit numbers
    fp8_kv_cache: bool  # the checkpoint has scales for a KV cache of 8-bit floats, and is meant to have one
    num_nextn_layers: int = 0  # layers behind the last one that predict further tokens; they are not loaded
    is_text_part: bool = False  # the checkpoint also holds models of other inputs, which are not loaded
    has_lm_head: bool = True  # False: it generates no tokens
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    images: ImageConfig | None = None  # None: it reads none
    image_encoder: ImageEncoderOptions | None = None  # of `images`
    audios: AudioConfig | None = None  # None: it reads none
    audio_encoder: AudioEncoderOptions | None = None  # of `audios`
    batch_invariant: bool = False  # for attention and logits on a GPU; `linear_method` has its own flag
    expert_parallel: bool = False  # divide experts by expert even where they can be divided by width
    stage: Stage = WHOLE  # that this rank computes

    @property
    def layers(self) -> tuple[LayerDeclaration, ...]:
        return self.decoder.layers

    @property
    def own_layers(self) -> Sequence[LayerDeclaration]:
        """The layers of `stage`."""
        return self.stage.own(self.layers)

    def expert_split(self, num_ranks: int) -> ExpertSplit | None:
        """How tensor parallel ranks divide the experts of every layer; None: it has none, or `transformers` makes
        them. Raises ValueError if they cannot be divided."""
        unit = self.linear_method.width_unit
        kinds = dict.fromkeys(layer.routed_experts for layer in self.layers)
        splits = [split_experts(sizes, num_ranks, unit, wanted=self.expert_parallel) for sizes in kinds if sizes]
        return max(splits, key=lambda split: split.by_expert, default=None)


class ModelClass(Protocol):
    """An architecture's class: reads its config.json, and builds the model."""

    defaults: Mapping[str, Any]  # fields that its config.json may omit
    names: tuple[tuple[str, str], ...]  # as `Weights.names`

    @staticmethod
    def read_options(fields: Mapping[str, Any]) -> DecoderOptions:
        """Raises ValueError, naming the field, for what is not supported."""
        ...

    def __call__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> CausalLM: ...


@runtime_checkable
class AudioModelClass(ModelClass, Protocol):
    """The class of an architecture that reads audio."""

    @staticmethod
    def read_audio(fields: Mapping[str, Any], files: AudioFiles) -> AudioEncoderOptions:
        """Raises ValueError, naming the field, for what is not supported."""
        ...


@runtime_checkable
class ImageModelClass(ModelClass, Protocol):
    """The class of an architecture that reads images."""

    @staticmethod
    def read_images(fields: Mapping[str, Any], files: ImageFiles) -> ImageEncoderOptions:
        """`fields` have `vision_config`. Raises ValueError, naming the field, for what is not supported."""
        ...


def make_batch_invariant(config: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """Return the batch-invariant configuration. Raises ValueError, naming the feature, if it is not supported with
    it."""
    if not isinstance(config.linear_method, Unquantized):
        raise ValueError("batch_invariant on a GPU is not supported with quantized weights")
    if any(layer.routed_experts for layer in config.layers):
        raise ValueError("batch_invariant on a GPU is not supported with a mixture of experts")
    if any(LatentLayer in layer.cache_kinds for layer in config.layers):  # `HeadLinear` is a batched product
        raise ValueError("batch_invariant on a GPU is not supported with latent attention")
    if tensor_parallel_size > 1:
        raise ValueError(
            f"batch_invariant on a GPU is not supported with tensor_parallel_size {tensor_parallel_size}, only with 1"
        )
    return replace(config, batch_invariant=True, linear_method=Unquantized(batch_invariant=True))


def make_expert_parallel(config: ModelConfig) -> ModelConfig:
    """Return the configuration in which ranks divide experts by expert. Raises ValueError if the model has none."""
    if config.is_adapted:
        raise ValueError(f"enable_expert_parallel is not supported: {config.architecture} is run by transformers")
    if not any(layer.routed_experts for layer in config.layers):
        raise ValueError(f"enable_expert_parallel needs a mixture of experts, which {config.architecture} is not")
    return replace(config, expert_parallel=True)


def check_prompt_embeds(config: ModelConfig) -> None:
    """Raises ValueError, with the reason, if prompts of the model cannot have embeddings in the place of tokens."""
    reason = config.decoder.needs_token_ids
    if config.is_encoder or not config.has_lm_head:
        reason = "it generates no tokens"
    if reason:
        raise ValueError(f"enable_prompt_embeds is not supported for {config.architecture}: {reason}")


def check_reads_audio(config: ModelConfig) -> None:
    """Raises ValueError if the model's tokens read an audio that no encoder was read for."""
    if not config.audios and any(CrossLayer in layer.cache_kinds for layer in config.layers):
        raise ValueError(f"language_model_only is not supported for {config.architecture}: it reads nothing but audio")


def at_stage(config: ModelConfig, index: int, count: int) -> ModelConfig:
    """Return the configuration of pipeline stage `index` of `count`. The cost of a layer is the number of its
    parameters, which a step reads. Raises ValueError if the model cannot be divided so."""
    if count == 1:
        return config
    undivided = config.decoder.undivided
    if config.is_encoder or config.is_adapted:
        undivided = "transformers runs it"
    if undivided:
        raise ValueError(f"pipeline_parallel_size must be 1 for {config.architecture}: {undivided}")
    costs = [layer.num_parameters(config.hidden_size) for layer in config.layers]
    head = config.vocab_size * config.hidden_size if config.has_lm_head else 0
    num_first = config.decoder.num_first_stage_layers if config.images is not None else 1
    return replace(config, stage=cut(costs, count, first_cost=head, num_first=num_first)[index])
