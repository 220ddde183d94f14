"""Builders of tiny models for embeddings, as sentence-transformers saves them, and for classification."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.tiny_models import make_tiny_model

MODULES = "sentence_transformers.models."


def make_embedding_model(
    folder: Path,
    mode: str,
    *,
    dense: tuple[int, ...] = (),
    normalize: bool = False,
    hidden_size: int = 64,
    **model: Any,
) -> Path:
    """`mode` is a pooling mode of sentence-transformers, `dense` the sizes of linear layers behind it. `model` are
    arguments of `make_tiny_model`."""
    make_tiny_model(folder, hidden_size=hidden_size, **model)
    pooling = {"word_embedding_dimension": hidden_size, f"pooling_mode_{mode}": True}
    if mode != "mean_tokens":
        pooling["pooling_mode_mean_tokens"] = False
    modules: list[tuple[str, dict[str, Any]]] = [("Transformer", {}), ("Pooling", pooling)]
    for size in dense:
        modules.append(("Dense", {"in_features": hidden_size, "out_features": size, "bias": True}))
        modules[-1][1]["activation_function"] = "torch.nn.modules.activation.Tanh"
        hidden_size = size
    if normalize:
        modules.append(("Normalize", {}))
    listed = []
    for index, (name, config) in enumerate(modules):
        path = "" if index == 0 else f"{index}_{name}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": MODULES + name})
        if index > 0:
            _write_module(folder / path, config)
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def _write_module(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if "out_features" in config:
        generator = torch.Generator().manual_seed(config["out_features"])
        weight = torch.randn(config["out_features"], config["in_features"], generator=generator) * 0.2
        bias = torch.randn(config["out_features"], generator=generator)
        save_file({"linear.weight": weight, "linear.bias": bias}, folder / "model.safetensors")
