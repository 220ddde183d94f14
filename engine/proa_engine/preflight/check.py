"""check_start: everything that can be known to fail a start before torch is imported, in the order of its cost.

Configuration and machine first, then the JSON files, which are downloaded if the model is on the hub or in an object
store, then the weights, of which the headers alone are read.
"""

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proa_engine.config import EngineConfig
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.head_count import check_head_count
from proa_engine.memory.arena_memory import existing_bytes
from proa_engine.memory.host import read_memory
from proa_engine.memory.requirements import check_gpu_weights, check_max_model_len, check_weights, weights_room
from proa_engine.models.generation_config import generation_folder, read_prompt_files
from proa_engine.models.quantization.read import read_quantization
from proa_engine.models.registry import REQUIRED_FIELDS, Form, architecture_of, is_adapted
from proa_engine.preflight.devices import Gpus, check_driver, check_gpus, check_torch, read_gpus, runs_on_cpu
from proa_engine.preflight.patterns import check_patterns
from proa_engine.preflight.ports import check_address
from proa_engine.preflight.tokenizers import check_vocabulary, read_prompt_templates, read_tokenizer
from proa_engine.preflight.weights import check_experts, check_tensors, least_bytes
from proa_engine.sources.folders import (
    missing_field,
    read_config,
    read_generation_config,
    read_json,
    stored_dtype,
    text_fields,
    weight_files,
)
from proa_engine.sources.resolve import (
    LORA_CONFIG_FILE,
    LORA_WEIGHTS_FILE,
    resolve_drafter,
    resolve_model,
    resolve_model_of,
    resolve_module,
    resolve_tokenizer,
)
from proa_engine.sources.weight_headers import read_header, read_headers

_MAX_SENTENCE = 1000  # characters
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Model:
    """`fields`: of config.json's text model. `decoder` None: `transformers` runs the model, and knows the rest."""

    folder: Path
    fields: Mapping[str, Any]
    architecture: str
    decoder: Form | None


def check_start(config: EngineConfig) -> None:
    """Raise ValueError if the engine cannot start. Downloads what is on the hub or in an object store. Logs a warning
    for what limits an engine that can start."""
    try:
        gpus = None if config.device == "cpu" else read_gpus()
        _check_machine(config, gpus)
        model = _read_model(config)
        if config.load_format != "dummy":
            _check_weights(config, model, gpus)
        if config.drafter:
            _check_drafter(config.drafter, config)
        if not config.skip_tokenizer_init:
            _check_tokenizer(config, model)
        for module in config.lora.lora_modules:
            _check_adapter(resolve_module(module.path, config.downloads))
    except OSError as error:
        raise ValueError(f"{error.filename or config.model} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(_sentence(str(error))) from error


def _sentence(text: str) -> str:
    """One line of a bounded length: files of a model's folder may have line breaks, and megabytes, in names."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SENTENCE else f"{line[: _MAX_SENTENCE - 2]} …"


def _check_machine(config: EngineConfig, gpus: Gpus | None) -> None:
    check_torch(config.device)
    if config.device == "cuda":
        check_driver()
    check_gpus(config.device, config.parallel.ranks_here, gpus)
    if config.compile_cache is not None:
        _check_compile_cache(Path(config.compile_cache))
        if runs_on_cpu(config.device, gpus):
            _log.warning("compile_cache has no effect on a CPU: kernels are compiled for GPUs alone")
    if config.kv_tiers.kv_transfer_address is not None:
        host, _, port = config.kv_tiers.kv_transfer_address.rpartition(":")
        for rank in range(config.parallel.ranks_here if int(port) else 0):
            check_address(host.strip("[]"), int(port) + rank, "--kv-transfer-address")


def _check_compile_cache(folder: Path) -> None:
    """Raise ValueError unless files can be written there. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"compiled kernels cannot be kept in {folder} (--compile-cache): {reason}") from error


def _read_model(config: EngineConfig) -> _Model:
    folder = resolve_model(config.model, config.revision, "dummy", config.downloads)
    stored = read_config(folder, config.hf_overrides)
    fields, (architecture, form) = text_fields(stored), architecture_of(stored)
    read_generation_config(generation_folder(config, folder))
    is_ours = not is_adapted(architecture)
    if is_ours:
        for name in REQUIRED_FIELDS:
            if fields.get(name) is None:
                raise ValueError(missing_field(name))
        stored_dtype(fields)
        read_quantization(fields.get("quantization_config"), config.quantization)
        if fields.get("max_position_embeddings") is not None:
            check_max_model_len(config.max_model_len, fields["max_position_embeddings"])
        if fields.get("num_attention_heads") is not None:
            check_head_count(fields["num_attention_heads"], config.parallel.tensor_parallel_size, "attention heads")
    return _Model(folder, fields, stored["architectures"][0], form if is_ours else None)


def _check_weights(config: EngineConfig, model: _Model, gpus: Gpus | None) -> None:
    tensors = read_headers(weight_files(resolve_model_of(config)))
    quantization = read_quantization(model.fields.get("quantization_config"), config.quantization)
    check_patterns(quantization, dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    if model.decoder is None:
        return
    check_tensors(tensors, model.fields, architecture=model.architecture, folder=str(model.folder))
    is_cpu = runs_on_cpu(config.device, gpus)
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = "float32" if is_cpu else stored_dtype(model.fields)
    check_experts(tensors, model.fields, quantization)
    least = least_bytes(tensors, model.fields, dtype=dtype, quantization=quantization, on_cpu=is_cpu is True)
    share = least // config.parallel.num_ranks  # of the ranks, which divide the weights, one has an equal share or more
    if is_cpu:
        memory, cache = read_memory(), config.kv_tiers.kv_offloading_path
        if cache is not None:  # this engine takes over what an earlier one has left there
            memory = replace(memory, available=memory.available + existing_bytes(Path(cache)))
        check_weights(share, weights_room(memory, config.parallel.ranks_here))
    elif is_cpu is False and gpus is not None:
        # The other GPUs, such as one for a display, are not used.
        smallest = gpus.memory[config.parallel.ranks_here - 1]
        sets_cache = config.kv_cache_memory_bytes is not None or config.num_gpu_blocks_override is not None
        check_gpu_weights(share, smallest, 1.0 if sets_cache else config.gpu_memory_utilization)


def _check_drafter(drafter: SpeculativeConfig, config: EngineConfig) -> None:
    """Raise ValueError unless its files can be read. Whether they fit the model is decided with the model's layers."""
    try:
        folder = resolve_drafter(drafter, config)
        read_config(folder)
        if config.load_format != "dummy":
            read_headers(weight_files(folder))
    except ValueError as error:
        raise ValueError(f"speculative_config: {error}") from error


def _check_tokenizer(config: EngineConfig, model: _Model) -> None:
    folder = resolve_tokenizer(config)
    tokenizer = read_tokenizer(folder)
    check_vocabulary(tokenizer, model.fields.get("vocab_size"), folder)
    templates = read_prompt_templates(read_prompt_files(config, folder), folder)
    chats = model.decoder is Form.CAUSAL_LM and not model.fields.get("is_encoder_decoder")
    if chats and config.runner != "pooling" and templates.plain is None:
        _log.warning(
            "the tokenizer in %s has %s: chat requests are rejected unless the gateway has --chat-template",
            folder,
            f"a chat template that cannot be used ({templates.error})" if templates.error else "no chat template",
        )


def _check_adapter(folder: Path) -> None:
    for name in (LORA_CONFIG_FILE, LORA_WEIGHTS_FILE):
        if not (folder / name).exists():
            raise ValueError(f"lora_modules: there is no adapter at {folder}: {name} is missing")
    try:
        read_json(folder / LORA_CONFIG_FILE)
        read_header(folder / LORA_WEIGHTS_FILE)
    except ValueError as error:
        raise ValueError(f"lora_modules: {error}") from error
