"""What GGUF's architectures are called by Hugging Face: the fields of config.json and the names of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Fields of config.json, by those of the metadata.
_FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Parts of a layer.
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA_NORM = {"ffn_norm": "post_attention_layernorm"}
_LLAMA = _ATTENTION | _MLP | _LLAMA_NORM
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_EXPERTS = {  # the star is the number of an expert: GGUF has all of a layer in one tensor
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_MIXTRAL = (
    _ATTENTION
    | _LLAMA_NORM
    | {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    }
)
_GEMMA2 = (
    _ATTENTION
    | _MLP
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_GEMMA_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERT_FIELDS = {
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
}


@dataclass(frozen=True, slots=True)
class Family:
    """`layers`: the names of a layer's parts, `outer`: those of what is beside the layers. `fields`: further ones of
    config.json, by those of the metadata behind the architecture's name. `constants`: fields of config.json that GGUF
    does not have.

    `alternates_heads`: the first and the second half of the rows of each head of q and k alternate. `norm_offset`: is
    added to the weights of norms. `shared_score_layers`: the model with so many layers scales scores by the heads'
    share of the hidden state, all others by their width; 0: scores have no such scale. `layer_types`: of layers without
    and with KV heads, where a model has both.
    """

    architecture: str
    model_type: str
    layers: Mapping[str, str]
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    alternates_heads: bool = False
    norm_offset: float = 0.0
    shared_score_layers: int = 0
    outer: Mapping[str, str] = field(default_factory=lambda: _OUTER)
    layer_types: tuple[str, str] | None = None

    @property
    def all_fields(self) -> Mapping[str, str]:
        return {**_FIELDS, **self.fields}


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", _LLAMA, alternates_heads=True),
    "llama with experts": Family(  # GGUF's name is llama, too
        "MixtralForCausalLM",
        "mixtral",
        _MIXTRAL,
        fields={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        alternates_heads=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _LLAMA | _QK_NORMS),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _LLAMA | _QK_NORMS | _EXPERTS,
        fields=_EXPERT_FIELDS,
        constants={"norm_topk_prob": True},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", "gemma2", _GEMMA2, fields=_GEMMA_FIELDS, norm_offset=1.0, shared_score_layers=46
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _GEMMA2 | _QK_NORMS,
        fields=_GEMMA_FIELDS | {"rope.freq_base_swa": "rope_local_base_freq"},
        norm_offset=1.0,
        shared_score_layers=62,
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        "lfm2",
        _LFM2,
        fields={"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        constants={"block_auto_adjust_ff_dim": False},
        # The norm behind the last layer has the name of one before the first.
        outer={**_OUTER, "output_norm": "model.embedding_norm", "token_embd_norm": "model.embedding_norm"},
        layer_types=("conv", "full_attention"),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        "granite",
        _LLAMA,
        fields={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "logit_scale": "logits_scaling",
            "residual_scale": "residual_multiplier",
        },
        alternates_heads=True,
    ),
}
