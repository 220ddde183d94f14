"""Checkpoints of tiny EAGLE-3 drafters with random weights, in the original form and in that of `speculators`."""

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
    folder.mkdir(parents=True, exist_ok=True)
    fields = json.loads((target / "config.json").read_text())
    fields = {
        **{name: fields[name] for name in _LAYER_FIELDS if name in fields},
        "model_type": "llama",
        "num_hidden_layers": 1,
        **(layer or {}),
    }
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
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = (fields[name] * fields["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    inner, prefix = fields["intermediate_size"], "layers.0" if form == "speculators" else "midlayer"
    shapes = {
        "fc": (size, len(taps) * size),
        "norm": (size,),
        f"{prefix}.input_layernorm": (size,),
        f"{prefix}.hidden_norm": (size,),
        f"{prefix}.post_attention_layernorm": (size,),
        f"{prefix}.self_attn.q_proj": (heads, 2 * size),
        f"{prefix}.self_attn.k_proj": (kv_heads, 2 * size),
        f"{prefix}.self_attn.v_proj": (kv_heads, 2 * size),
        f"{prefix}.self_attn.o_proj": (size, heads),
        f"{prefix}.mlp.gate_proj": (inner, size),
        f"{prefix}.mlp.up_proj": (inner, size),
        f"{prefix}.mlp.down_proj": (size, inner),
    }
    if fields["model_type"] == "qwen3":
        shapes |= {f"{prefix}.self_attn.{each}_norm": (fields["head_dim"],) for each in "qk"}
    if options.get("norm_before_fc"):
        shapes["input_norm"] = (len(taps) * size,)
    if options.get("fc_norm"):
        shapes |= {f"fc_norm.{number}": (size,) for number in range(len(taps))}
    if own_embedding:
        shapes["embed_tokens"] = (vocab_size, size)
    if own_head or draft_ids is not None:
        shapes["lm_head"] = (config["draft_vocab_size"], size)
    tensors = {
        f"{name}.weight": 0.1 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if draft_ids is not None:
        tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, draft_ids, True)
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
