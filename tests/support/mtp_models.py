"""Tiny models whose checkpoints have a layer for further tokens, made from the last layer of a model with one more."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import LATENT, MIXTURES, RECURRENT, make_tiny_model

_RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, "num_hidden_layers": 3},
    "glm4_moe": {**MIXTURES["glm4_moe"], "num_hidden_layers": 3},
    "glm4_moe_lite": {**LATENT, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3},
    **{name: _RECURRENT for name in RECURRENT},
}
FAMILIES = tuple(_OPTIONS)


def make_mtp_model(folder: Path, family: str, seed: int = 4) -> tuple[Path, Path]:
    """Write a model with a layer for further tokens to `folder`/model, and one of `transformers` with that layer as its
    last one to `folder`/whole. Returns both."""
    whole, model = make_tiny_model(folder / "whole", family, seed=seed, **_OPTIONS[family]), folder / "model"
    config = json.loads((whole / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    tensors, size = load_file(whole / "model.safetensors"), config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    old, is_qwen = f"model.layers.{last}", family in RECURRENT
    new = "mtp.layers.0" if is_qwen else old
    kept = {name.replace(f"{old}.", f"{new}."): tensor for name, tensor in tensors.items()}
    if is_qwen:
        names = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
    else:
        names = f"{new}.enorm", f"{new}.hnorm", f"{new}.eh_proj", f"{new}.shared_head.norm"
        for repeated, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            kept[f"{new}.{repeated}.weight"] = tensors[f"{original}.weight"].clone()
    center = 0.0 if is_qwen else 1.0  # of the norms' stored weights
    embedding_norm, hidden_norm, projection, final_norm = names
    for name in (embedding_norm, hidden_norm, final_norm):
        kept[f"{name}.weight"] = center + random(size)
    kept[f"{projection}.weight"] = random(size, 2 * size)
    model.mkdir()
    for path in whole.iterdir():
        if path.suffix != ".safetensors":
            (model / path.name).write_bytes(path.read_bytes())
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:last]
    (model / "config.json").write_text(json.dumps(config))
    save_file(kept, model / "model.safetensors")
    return model, whole
