"""A model's generation_config.json as the engine's options change it: end tokens, and sampling parameters of requests
without them. Does not import torch, which takes seconds."""

import json
import os
from pathlib import Path

from proa_engine.config import EngineConfig
from proa_engine.sources.folders import GENERATION_FILE, read_file, read_generation_config, read_tokenizer_files
from proa_engine.sources.resolve import resolve_model_of


def generation_folder(config: EngineConfig, folder: Path) -> Path:
    """The folder whose generation_config.json is read for the model in `folder`. Raises ValueError."""
    if config.generation_config in ("auto", "vllm"):
        return folder
    given = Path(os.path.expanduser(config.generation_config))  # that of `Path` raises if there is no such user
    if not (given / GENERATION_FILE).is_file():
        raise ValueError(f"generation_config {given} is neither auto nor vllm nor a folder with {GENERATION_FILE}")
    return given


def read_prompt_files(config: EngineConfig, tokenizer_folder: Path | None) -> dict[str, bytes]:
    """Return the tokenizer's files by name, with the generation_config.json that the options say. Empty without a
    folder, or without a tokenizer.json in it."""
    files = read_tokenizer_files(tokenizer_folder)
    if not files or tokenizer_folder is None:
        return {}
    if config.tokenizer is None:
        folder = tokenizer_folder
    else:
        folder = resolve_model_of(config)
        files.pop(GENERATION_FILE, None)
    folder = generation_folder(config, folder)
    if config.generation_config == "vllm":  # end tokens are the model's, but no sampling parameters
        files.pop(GENERATION_FILE, None)
    elif (data := read_file(folder / GENERATION_FILE)) is not None:
        files[GENERATION_FILE] = data
    if config.override_generation_config:
        fields = {} if config.generation_config == "vllm" else read_generation_config(folder)
        files[GENERATION_FILE] = json.dumps({**fields, **config.override_generation_config}).encode()
    return files
