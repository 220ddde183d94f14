"""InternLM2, EXAONE 3, Baichuan, Orion and ChatGLM: Llama or GLM-4 with other names of fields and tensors."""

from dataclasses import replace
from typing import ClassVar

from proa_engine.layers.norm import LayerNormOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.families.llama import GlmForCausalLM, LlamaForCausalLM, equal_layers


class InternLM2ForCausalLM(DecoderForCausalLM):
    """InternLM2 and 2.5: Llama, of whose matrix of q, k and v each KV head has a block of rows."""

    defaults: ClassVar[read.Fields] = {"bias": True}
    names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("embed_tokens", "tok_embeddings"),
        ("self_attn", "attention"),
        ("qkv_proj", "wqkv"),
        ("o_proj", "wo"),
        ("mlp", "feed_forward"),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    )

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return equal_layers(fields, qkv_bias=fields["bias"], output_bias=fields["bias"], stored_by_groups=True)


class ExaoneForCausalLM(DecoderForCausalLM):
    """EXAONE 3 and 3.5, EXAONE Deep: Llama."""

    defaults: ClassVar[read.Fields] = {"layer_norm_epsilon": 1e-5}
    names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("embed_tokens", "wte"),
        ("layers", "h"),
        ("norm", "ln_f"),
        ("self_attn", "attn.attention"),
        ("o_proj", "out_proj"),
        ("gate_proj", "c_fc_0"),
        ("up_proj", "c_fc_1"),
        ("down_proj", "c_proj"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
    )

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        names = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}
        return LlamaForCausalLM.read_options(read.renamed(fields, names))


class BaiChuanForCausalLM(DecoderForCausalLM):
    """Baichuan-7B: Llama with q, k and v in one matrix."""

    names: ClassVar[tuple[tuple[str, str], ...]] = (("qkv_proj", "W_pack"),)

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        # No field says so. Those of 13B have no number of positions either.
        if "max_position_embeddings" not in fields or fields["hidden_size"] > 4096:
            raise ValueError(
                f"hidden_size {fields['hidden_size']} is not supported: Baichuan of 13B has ALiBi in place of rotations"
            )
        return equal_layers(fields, stored_merged=True)


class BaichuanForCausalLM(BaiChuanForCausalLM):
    """Baichuan2-7B: Baichuan-7B whose LM head has rows of length 1."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return replace(BaiChuanForCausalLM.read_options(fields), normalizes_head=True)


class OrionForCausalLM(DecoderForCausalLM):
    """Orion: Llama with LayerNorm."""

    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return equal_layers(fields, norm=LayerNormOptions(fields["rms_norm_eps"]))


class ChatGLMForConditionalGeneration(DecoderForCausalLM):
    """ChatGLM2 and 3, and GLM-4 with the code of its folder: GLM-4 with q, k and v in one matrix."""

    defaults: ClassVar[read.Fields] = {**GlmForCausalLM.defaults, "layernorm_epsilon": 1e-5, "add_qkv_bias": False}
    names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("embed_tokens", "embedding.word_embeddings"),
        ("layers", "encoder.layers"),
        ("norm", "encoder.final_layernorm"),
        ("self_attn", "self_attention"),
        ("qkv_proj", "query_key_value"),
        ("o_proj", "dense"),
        ("gate_up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h"),
    )

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        for name in ("original_rope", "rmsnorm", "post_layer_norm"):
            read.require(fields, name, (True,))
        for name in (
            "add_bias_linear",
            "apply_residual_connection_post_layernorm",
            "fp32_residual_connection",
            "interleaved_qkv",
            "quantization_bit",
        ):
            read.require(fields, name, (False,))
        read.require(fields, "pre_seq_len", ())
        names = {
            "attention_bias": "add_qkv_bias",
            "head_dim": "kv_channels",
            "intermediate_size": "ffn_hidden_size",
            "rms_norm_eps": "layernorm_epsilon",
        }
        if fields.get("multi_query_attention"):
            names["num_key_value_heads"] = "multi_query_group_num"
        theta = 10_000.0 * fields.get("rope_ratio", 1)
        fields = {**read.renamed(fields, names), "rope_theta": theta}
        mlp, rope = read.gated_mlp(fields, stored_merged=True), read.rope(fields, interleaved=True, partial=True)
        return equal_layers(fields, mlp=mlp, rope=rope, output_bias=False, stored_merged=True)
