"""Checkpoints of tiny drafters with random weights, EAGLE-3's and those of blocks (DFlash, DSpark), in the original
forms and in that of `speculators`."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

Form = Literal["original", "speculators"]


def write_eagle3(
    folder: Path,
    target: Path,
    form: Form = "speculators",
    *,
    taps: tuple[int, ...] = (0, 1, 2),
    seed: int = 0,
    draft_ids: Tensor | None = None,
    own_embedding: bool = False,
    own_head: bool = False,
    layer: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write a drafter of the model in `target` to `folder`; returns it.

    `draft_ids` [draft vocabulary]: the model's ids of the drafter's tokens; None: the same vocabulary. `layer` are
    fields of the layer's configuration, and `options` of the drafter's.
    """
    fields = _layer_fields(target, {"model_type": "llama", "num_hidden_layers": 1} | (layer or {}))
    vocab_size, size = fields["vocab_size"], fields["hidden_size"]
    config = {"draft_vocab_size": vocab_size if draft_ids is None else len(draft_ids)} | options
    if form == "speculators":
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "eagle_aux_hidden_state_layer_ids": list(taps),
            "transformer_layer_config": fields,
        }
    else:
        config |= fields | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
        }
    prefix = "layers.0" if form == "speculators" else "midlayer"
    shapes = {
        "fc": (size, len(taps) * size),
        "norm": (size,),
        f"{prefix}.hidden_norm": (size,),
        **_layer_shapes(prefix, fields, 2 * size),
    }
    if options.get("norm_before_fc"):
        shapes["input_norm"] = (len(taps) * size,)
    if options.get("fc_norm"):
        shapes |= {f"fc_norm.{number}": (size,) for number in range(len(taps))}
    if own_embedding:
        shapes["embed_tokens"] = (vocab_size, size)
    if own_head or draft_ids is not None:
        shapes["lm_head"] = (config["draft_vocab_size"], size)
    return _write(folder, config, shapes, draft_ids, seed)


def write_block(
    folder: Path,
    target: Path,
    form: Form = "original",
    *,
    method: Literal["dflash", "dspark"] = "dflash",
    taps: tuple[int, ...] = (1, 2),
    num_layers: int = 2,
    seed: int = 0,
    draft_ids: Tensor | None = None,
    layer: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write layers that propose blocks to `folder`; returns it. `taps` are the numbers of layers before the states that
    are read, the other arguments as for `write_eagle3`."""
    fields = _layer_fields(target, {"model_type": "qwen3", "num_hidden_layers": num_layers} | (layer or {}))
    vocab_size, size, rank = fields["vocab_size"], fields["hidden_size"], 8
    draft_vocab_size = vocab_size if draft_ids is None else len(draft_ids)
    config: dict[str, Any] = {"block_size": 6, "mask_token_id": vocab_size - 1, "draft_vocab_size": draft_vocab_size}
    if method == "dspark":
        config |= {"markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": True}
    config |= options
    ids = [tap - 1 for tap in taps]
    if form == "speculators":
        config |= {
            "speculators_model_type": method,
            "aux_hidden_state_layer_ids": list(taps),
            "transformer_layer_config": fields,
        }
    elif method == "dspark":
        config |= fields | {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": ids}
    else:
        own = {"mask_token_id": config.pop("mask_token_id"), "target_layer_ids": ids}
        config |= fields | {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    shapes = {"fc": (size, len(taps) * size), "norm": (size,), "hidden_norm": (size,)}
    for number in range(num_layers):
        shapes |= _layer_shapes(f"layers.{number}", fields, size)
    if form == "speculators" or draft_ids is not None:
        shapes |= {"embed_tokens": (vocab_size, size), "lm_head": (draft_vocab_size, size)}
    if method == "dspark":
        shapes |= {
            "markov_head.markov_w1": (vocab_size, rank),
            "markov_head.markov_w2": (draft_vocab_size, rank),
            "confidence_head.proj": (1, size + rank),
        }
    return _write(folder, config, shapes, draft_ids, seed)


def _layer_fields(target: Path, layer: dict[str, Any]) -> dict[str, Any]:
    fields = json.loads((target / "config.json").read_text())
    return {name: fields[name] for name in _LAYER_FIELDS if name in fields} | layer


def _layer_shapes(prefix: str, fields: dict[str, Any], input_size: int) -> dict[str, tuple[int, ...]]:
    """Of a layer whose q, k and v read `input_size` values."""
    heads, kv_heads = (fields[name] * fields["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    size, inner = fields["hidden_size"], fields["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.input_layernorm": (size,),
        f"{prefix}.post_attention_layernorm": (size,),
        f"{prefix}.self_attn.q_proj": (heads, input_size),
        f"{prefix}.self_attn.k_proj": (kv_heads, input_size),
        f"{prefix}.self_attn.v_proj": (kv_heads, input_size),
        f"{prefix}.self_attn.o_proj": (size, heads),
        f"{prefix}.mlp.gate_proj": (inner, size),
        f"{prefix}.mlp.up_proj": (inner, size),
        f"{prefix}.mlp.down_proj": (size, inner),
    }
    if fields["model_type"] == "qwen3":
        shapes |= {f"{prefix}.self_attn.{each}_norm": (fields["head_dim"],) for each in "qk"}
    return shapes


def _write(
    folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], draft_ids: Tensor | None, seed: int
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.weight": 0.1 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if draft_ids is not None:
        tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
        tensors["t2d"] = torch.zeros(int(draft_ids.max()) + 1, dtype=torch.bool).index_fill_(0, draft_ids, True)
    save_file(tensors, folder / "model.safetensors")
    return folder


_LAYER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "max_position_embeddings",
)
