"""GLM-4-0414: GLM-4 with norms before and after attention and the feed-forward layer."""

from typing import ClassVar

from proa_engine.models.decoder_layer import NormNames
from proa_engine.models.glm import GlmForCausalLM


class Glm4ForCausalLM(GlmForCausalLM):
    norms: ClassVar[NormNames] = NormNames(
        before_attention="input_layernorm",
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    )
