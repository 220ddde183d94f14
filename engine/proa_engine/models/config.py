"""ModelConfig: a model's parameters from config.json, checked and with defaults filled in.

Raises ValueError, naming the field, for what the engine does not support, before any weight is read. What depends on
the architecture is read by its class (`registry`), most of it with the functions of `fields`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from proa.contract import PoolingTask
from proa_engine.config import EngineConfig
from proa_engine.layers.cache_layers import LatentLayer, StateLayer
from proa_engine.layers.expert_split import ExpertSplit, split_experts
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.norm import NormOptions
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import LinearMethod, Weights
from proa_engine.models.base import CausalLM
from proa_engine.models.checkpoint import tensor_names, tensor_shape
from proa_engine.models.decoder_layer import LayerDeclaration
from proa_engine.models.folders import (
    STORED_DTYPES,
    missing_field,
    read_config,
    read_generation_config,
    stored_dtype,
    text_fields,
)
from proa_engine.models.generation_config import generation_folder
from proa_engine.models.image_config import ImageConfig, ImageEncoderOptions
from proa_engine.models.image_files import ImageFiles
from proa_engine.models.pooling_config import (
    EmbeddingModules,
    PoolingConfig,
    PoolingKind,
    classification_config,
    colbert_modules,
    embedding_config,
    read_embedding_modules,
    reward_config,
)
from proa_engine.models.quantization.methods import linear_method
from proa_engine.models.quantization.read import read_quantization
from proa_engine.models.registry import (
    COLBERT,
    COLBERT_ENCODER,
    Form,
    architecture_of,
    is_adapted,
    is_encoder,
    model_class,
    standard_fields,
)
from proa_engine.models.stages import WHOLE, Stage, cut

Runner = Literal["auto", "generate", "pooling"]
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in STORED_DTYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """An architecture's layers, and what is around them."""

    layers: tuple[LayerDeclaration, ...]
    norm: NormOptions  # of the last layer's output
    embedding_scale: float = 1.0
    scales_prompt_embeds: bool = False  # whether embeddings in place of tokens are scaled, as in transformers
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None  # c: logits become c * tanh(logits / c)
    num_first_stage_layers: int = 1  # layers that must be on the first pipeline stage, which has the images
    needs_token_ids: str = ""  # why each token needs an id beside its embedding; empty: none does
    undivided: str = ""  # what keeps the layers from being divided among pipeline stages; empty: nothing


@contextmanager
def _explained() -> Iterator[None]:
    """Raise ValueError for a field that config.json lacks, or with whose value an architecture cannot compute."""
    try:
        yield
    except KeyError as error:
        raise ValueError(missing_field(str(error.args[0]))) from error
    except (ArithmeticError, AttributeError, IndexError, TypeError) as error:
        raise ValueError(
            "config.json cannot be read: a field has the wrong type, or a value that no model has "
            f"({type(error).__name__}: {error})"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Parameters of a model. Sizes are full sizes, before sharding."""

    architecture: str
    model_type: str  # empty: config.json names none
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    decoder: DecoderOptions
    eos_token_ids: tuple[int, ...]
    torch_dtype: torch.dtype  # type of the unquantized weights on disk
    linear_method: LinearMethod  # how matrices are stored and multiplied
    fp8_kv_cache: bool  # the checkpoint has scales for a KV cache of 8-bit floats, and is meant to have one
    num_nextn_layers: int = 0  # layers behind the last one that predict further tokens; they are not loaded
    is_text_part: bool = False  # the checkpoint also holds models of other inputs, which are not loaded
    has_lm_head: bool = True  # False: it generates no tokens
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    images: ImageConfig | None = None  # None: it reads none
    image_encoder: ImageEncoderOptions | None = None  # of `images`
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

    @property
    def is_encoder(self) -> bool:
        """Whether a prompt is computed in one step, and nothing is cached."""
        return is_encoder(self.architecture)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state, which cannot forget a token."""
        return any(layer.cache_kind is StateLayer for layer in self.layers)

    def expert_split(self, num_ranks: int) -> ExpertSplit | None:
        """How tensor parallel ranks divide the experts of every layer; None: it has none, or `transformers` makes
        them. Raises ValueError if they cannot be divided."""
        unit = self.linear_method.width_unit
        kinds = dict.fromkeys(layer.routed_experts for layer in self.layers)
        splits = [split_experts(sizes, num_ranks, unit, wanted=self.expert_parallel) for sizes in kinds if sizes]
        return max(splits, key=lambda split: split.by_expert, default=None)

    @classmethod
    def of_engine(cls, config: EngineConfig, folder: Path, *, language_model_only: bool) -> "ModelConfig":
        """Read `folder` with the engine's options. Raises ValueError as `from_folder` does."""
        return cls.from_folder(
            folder,
            config.quantization,
            config.runner,
            language_model_only=language_model_only,
            overrides=config.hf_overrides,
            generation_from=generation_folder(config, folder),
        )

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        quantization: str | None = None,
        runner: Runner = "auto",
        *,
        language_model_only: bool = False,
        overrides: Mapping[str, Any] | None = None,
        generation_from: Path | None = None,
    ) -> "ModelConfig":
        """Read `folder`/config.json, the end tokens from generation_config.json, the pooling from modules.json, and how
        images are read. `quantization`, `runner` and `language_model_only` are the user's options, `overrides` are
        changes of config.json, and `generation_from` is the folder of generation_config.json if that is another one.

        Raises ValueError, naming what is not supported.
        """
        config, modules = read_config(Path(folder), overrides), read_embedding_modules(Path(folder))
        generation = read_generation_config(generation_from or Path(folder))
        if config.get("architectures") == [COLBERT]:
            config = config | {"architectures": [COLBERT_ENCODER]}
            modules = colbert_modules(Path(folder), tensor_shape(Path(folder), "linear.weight"))
        files = None if language_model_only or not config.get("vision_config") else ImageFiles.from_folder(Path(folder))
        read = cls.from_dicts(config, generation, quantization, runner, modules, files)
        if read.image_encoder is not None:
            names = tensor_names(Path(folder))
            if names and not any(name.startswith(read.image_encoder.weights_name) for name in names):
                files = None  # the text model of a larger one, saved under the larger one's configuration
                read = cls.from_dicts(config, generation, quantization, runner, modules)
        # sentence-transformers saves models for embeddings as causal language models without an LM head.
        names = tensor_names(Path(folder)) if modules and read.has_lm_head and not read.tie_word_embeddings else []
        if names and not any(name.endswith("lm_head.weight") for name in names):
            read = cls.from_dicts(config, generation, quantization, "pooling", modules, files)
        return read

    @classmethod
    @_explained()
    def from_dicts(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        quantization: str | None = None,
        runner: Runner = "auto",
        modules: EmbeddingModules | None = None,
        image_files: ImageFiles | None = None,
    ) -> "ModelConfig":
        """`modules` are those of the folder, if any. `image_files` None: images are not read."""
        architecture, form = architecture_of(config)
        has_lm_head = form is Form.CAUSAL_LM and runner != "pooling"
        if runner == "generate" and not has_lm_head:
            raise ValueError(f"runner generate is not supported: {config['architectures'][0]} has no LM head")
        model: ModelClass = model_class(architecture)
        fields = {**model.defaults, **text_fields(config)}
        if image_files is None:
            fields.pop("vision_config", None)
        if is_adapted(architecture):
            fields = standard_fields(architecture, fields)
        decoder = model.read_options(fields)
        # "vision" is of the tokens of images alone.
        if fields.get("is_causal") is False or fields.get("use_bidirectional_attention") in (True, "all"):
            raise ValueError(f"bidirectional attention is not supported in {config['architectures'][0]}")
        pooling = _pooling(config, form, modules, fields["hidden_size"], has_lm_head=has_lm_head)
        stored_as = read_quantization(fields.get("quantization_config"), quantization)
        encoder: ImageEncoderOptions | None = None
        if image_files is not None and isinstance(model, ImageModelClass):
            encoder = model.read_images(fields, image_files)
        return cls(
            architecture=architecture,
            model_type=config.get("model_type") or "",
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            max_position_embeddings=min(fields.get("max_position_embeddings", 2048), pooling.max_tokens or sys.maxsize),
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            decoder=decoder,
            eos_token_ids=_eos_token_ids(fields, generation),
            torch_dtype=TORCH_DTYPES[stored_dtype(fields)],
            is_text_part="text_config" in config and encoder is None,
            num_nextn_layers=fields.get("num_nextn_predict_layers") or 0,
            linear_method=linear_method(stored_as, fields.get("quantization_config")),
            fp8_kv_cache=stored_as.fp8_kv_cache,
            has_lm_head=has_lm_head,
            pooling=pooling,
            images=None if encoder is None else encoder.config(),
            image_encoder=encoder,
        )


class ModelClass(Protocol):
    """An architecture's class: reads its config.json, and builds the model."""

    defaults: Mapping[str, Any]  # fields that its config.json may omit

    @staticmethod
    def read_options(fields: Mapping[str, Any]) -> DecoderOptions:
        """Raises ValueError, naming the field, for what is not supported."""
        ...

    def __call__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> CausalLM: ...


@runtime_checkable
class ImageModelClass(ModelClass, Protocol):
    """The class of an architecture that reads images."""

    @staticmethod
    def read_images(fields: Mapping[str, Any], files: ImageFiles) -> ImageEncoderOptions:
        """`fields` have `vision_config`. Raises ValueError, naming the field, for what is not supported."""
        ...


def _pooling(
    config: Mapping[str, Any], form: Form, modules: EmbeddingModules | None, hidden_size: int, *, has_lm_head: bool
) -> PoolingConfig:
    kind = PoolingKind.LAST
    if is_encoder(config["architectures"][0]):
        kind = PoolingKind.MEAN if config.get("classifier_pooling") == "mean" else PoolingKind.FIRST
    if form is Form.CLASSIFIER:
        return classification_config(config, kind)
    if form in (Form.REWARD, Form.PROCESS_REWARD):
        return reward_config(1 if form is Form.REWARD else 2)
    if not has_lm_head:
        return embedding_config(modules, hidden_size, kind)
    logprobs = {PoolingTask.TOKEN_LOGPROBS: PoolingKind.LAST}
    if modules is None:
        return PoolingConfig(kinds=logprobs)
    pooling = embedding_config(modules, hidden_size, kind)
    return replace(pooling, kinds={**pooling.kinds, **logprobs}, max_tokens=None)  # the limit is that of embeddings


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def make_batch_invariant(config: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """Return the batch-invariant configuration. Raises ValueError, naming the feature, if it is not supported with
    it."""
    if not isinstance(config.linear_method, Unquantized):
        raise ValueError("batch_invariant on a GPU is not supported with quantized weights")
    if any(layer.routed_experts for layer in config.layers):
        raise ValueError("batch_invariant on a GPU is not supported with a mixture of experts")
    if any(layer.cache_kind is LatentLayer for layer in config.layers):  # `HeadLinear` is a batched product
        raise ValueError("batch_invariant on a GPU is not supported with latent attention")
    if tensor_parallel_size > 1:
        raise ValueError(
            f"batch_invariant on a GPU is not supported with tensor_parallel_size {tensor_parallel_size}, only with 1"
        )
    return replace(config, batch_invariant=True, linear_method=Unquantized(batch_invariant=True))


def make_expert_parallel(config: ModelConfig) -> ModelConfig:
    """Return the configuration in which ranks divide experts by expert. Raises ValueError if the model has none."""
    if is_adapted(config.architecture):
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


def at_stage(config: ModelConfig, index: int, count: int) -> ModelConfig:
    """Return the configuration of pipeline stage `index` of `count`. The cost of a layer is the number of its
    parameters, which a step reads. Raises ValueError if the model cannot be divided so."""
    if count == 1:
        return config
    undivided = config.decoder.undivided
    if is_encoder(config.architecture) or is_adapted(config.architecture):
        undivided = "transformers runs it"
    if undivided:
        raise ValueError(f"pipeline_parallel_size must be 1 for {config.architecture}: {undivided}")
    costs = [layer.num_parameters(config.hidden_size) for layer in config.layers]
    head = config.vocab_size * config.hidden_size if config.has_lm_head else 0
    num_first = config.decoder.num_first_stage_layers if config.images is not None else 1
    return replace(config, stage=cut(costs, count, first_cost=head, num_first=num_first)[index])
