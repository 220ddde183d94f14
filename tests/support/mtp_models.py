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
    "mimo": {"num_hidden_layers": 3},
}
FAMILIES = tuple(_OPTIONS)


def parts_of(family: str) -> tuple[str, tuple[str, str, str, str]]:
    """How the layer behind two others, or three, is called; and the norms of the embedding and of the hidden state, the
    projection and the last norm."""
    if family in RECURRENT:
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return "mtp.layers.0", (*norms, "mtp.fc", "mtp.norm")
    layer, names = "model.layers.2", ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    if family == "mimo":
        layer = "model.mtp_layers.0"
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    of_embedding, of_hidden, projection, final = (f"{layer}.{name}" for name in names)
    return layer, (of_embedding, of_hidden, projection, final)


def make_mtp_model(folder: Path, family: str, seed: int = 4) -> tuple[Path, Path]:
    """Write a model with a layer for further tokens to `folder`/model, and one of `transformers` with that layer as its
    last one to `folder`/whole. Returns both."""
    base = "qwen2" if family == "mimo" else family
    whole, model = make_tiny_model(folder / "whole", base, seed=seed, **_OPTIONS[family]), folder / "model"
    config = json.loads((whole / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    tensors, size = load_file(whole / "model.safetensors"), config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    new, (embedding_norm, hidden_norm, projection, final_norm) = parts_of(family)
    kept = {name.replace(f"model.layers.{last}.", f"{new}."): tensor for name, tensor in tensors.items()}
    if new == f"model.layers.{last}":
        for repeated, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            kept[f"{new}.{repeated}.weight"] = tensors[f"{original}.weight"].clone()
    center = 0.0 if family in RECURRENT else 1.0  # of the norms' stored weights
    for name in (embedding_norm, hidden_norm, final_norm):
        kept[f"{name}.weight"] = center + random(size)
    kept[f"{projection}.weight"] = random(size, 2 * size)
    model.mkdir()
    for path in whole.iterdir():
        if path.suffix != ".safetensors":
            (model / path.name).write_bytes(path.read_bytes())
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    if family == "mimo":  # which `transformers` does not have
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:last]
    (model / "config.json").write_text(json.dumps(config))
    save_file(kept, model / "model.safetensors")
    return model, whole


def make_library_mtp(model: Path, folder: Path, **changes: Any) -> Path:
    """Write the layer of a model of Qwen's to `folder`, as the library `speculators` stores it. Returns `folder`."""
    names = {
        "mtp.pre_fc_norm_embedding": "token_layernorm",
        "mtp.pre_fc_norm_hidden": "hidden_layernorm",
        "mtp.fc": "input_proj",
        "mtp.norm": "final_layernorm",
    }
    tensors = dict[str, torch.Tensor]()
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.startswith("mtp."):
            own = names.get(name.removesuffix(".weight"))
            tensors[f"mtp_layers.0.{own}.weight" if own else name.replace("mtp.layers.0", "mtp_layers.0")] = tensor
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": json.loads((model / "config.json").read_text()),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder
