"""Reads a model's config.json into a `ModelConfig`, checked and with defaults filled in.

Raises ValueError, naming the field, for what the engine does not support, before any weight is read. What depends on
the architecture is read by its class (`registry`), most of it with the functions of `fields`.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from proa.contract import PoolingTask
from proa_engine.config import EngineConfig
from proa_engine.models.audio_config import AudioEncoderOptions
from proa_engine.models.config import AudioModelClass, ImageModelClass, ModelClass, ModelConfig
from proa_engine.models.generation_config import generation_folder
from proa_engine.models.image_config import ImageEncoderOptions
from proa_engine.models.image_files import AudioFiles, ImageFiles
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
from proa_engine.models.weight_sources import tensor_names, tensor_shape
from proa_engine.sources.folders import (
    STORED_DTYPES,
    missing_field,
    read_config,
    read_generation_config,
    stored_dtype,
    text_fields,
)

Runner = Literal["auto", "generate", "pooling"]
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in STORED_DTYPES}


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


def of_engine(config: EngineConfig, folder: Path, *, language_model_only: bool) -> ModelConfig:
    """Read `folder` with the engine's options. Raises ValueError as `from_folder` does."""
    return from_folder(
        folder,
        config.quantization,
        config.runner,
        language_model_only=language_model_only,
        overrides=config.hf_overrides,
        generation_from=generation_folder(config, folder),
    )


def from_folder(
    folder: Path | str,
    quantization: str | None = None,
    runner: Runner = "auto",
    *,
    language_model_only: bool = False,
    overrides: Mapping[str, Any] | None = None,
    generation_from: Path | None = None,
) -> ModelConfig:
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
    reads_audio = not language_model_only and not {"audio_config", "num_mel_bins"}.isdisjoint(config)
    audio_files = AudioFiles.from_folder(Path(folder), generation) if reads_audio else None
    read = from_dicts(config, generation, quantization, runner, modules, files, audio_files)
    if read.image_encoder is not None:
        names = tensor_names(Path(folder))
        if names and not any(name.startswith(read.image_encoder.weights_name) for name in names):
            files = None  # the text model of a larger one, saved under the larger one's configuration
            read = from_dicts(config, generation, quantization, runner, modules)
    # sentence-transformers saves models for embeddings as causal language models without an LM head.
    names = tensor_names(Path(folder)) if modules and read.has_lm_head and not read.tie_word_embeddings else []
    if names and not any(name.endswith("lm_head.weight") for name in names):
        read = from_dicts(config, generation, quantization, "pooling", modules, files)
    return read


@_explained()
def from_dicts(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    quantization: str | None = None,
    runner: Runner = "auto",
    modules: EmbeddingModules | None = None,
    image_files: ImageFiles | None = None,
    audio_files: AudioFiles | None = None,
) -> ModelConfig:
    """`modules` are those of the folder, if any. `image_files` or `audio_files` None: images or audios are not read."""
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
    is_bidirectional = fields.get("is_causal") is False or fields.get("use_bidirectional_attention") in (True, "all")
    if is_bidirectional and not is_encoder(architecture):
        raise ValueError(f"bidirectional attention is not supported in {config['architectures'][0]}")
    pooling = _pooling(config, form, modules, fields["hidden_size"], has_lm_head=has_lm_head)
    stored_as = read_quantization(fields.get("quantization_config"), quantization)
    encoder: ImageEncoderOptions | None = None
    if image_files is not None and isinstance(model, ImageModelClass):
        encoder = model.read_images(fields, image_files)
    audio_encoder: AudioEncoderOptions | None = None
    if audio_files and isinstance(model, AudioModelClass):
        audio_encoder = model.read_audio(fields, audio_files)
    audios = audio_encoder.config() if audio_encoder else None
    if audios and audios.alignment_heads:
        pooling = replace(pooling, kinds={**pooling.kinds, PoolingTask.ALIGN: PoolingKind.ALL})
    return ModelConfig(
        architecture=architecture,
        is_encoder=is_encoder(architecture),
        is_adapted=is_adapted(architecture),
        model_type=config.get("model_type") or "",
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        max_position_embeddings=min(fields.get("max_position_embeddings", 2048), pooling.max_tokens or sys.maxsize),
        tie_word_embeddings=fields.get("tie_word_embeddings", False),
        decoder=decoder,
        eos_token_ids=_eos_token_ids(fields, generation),
        torch_dtype=TORCH_DTYPES[stored_dtype(fields)],
        is_text_part=not {"text_config", "vision_config"}.isdisjoint(config) and not (encoder or audio_encoder),
        num_nextn_layers=fields.get("num_nextn_predict_layers") or 0,
        linear_method=linear_method(stored_as, fields.get("quantization_config")),
        multiplies_8_bits=stored_as.multiplies_8_bits,
        fp8_kv_cache=stored_as.fp8_kv_cache,
        has_lm_head=has_lm_head,
        pooling=pooling,
        images=None if encoder is None else encoder.config(),
        image_encoder=encoder,
        audios=audios,
        audio_encoder=audio_encoder,
    )


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
