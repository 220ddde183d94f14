"""Gemma 2: norms before and after attention and the feed-forward layer, a window on every other layer, soft caps.

Norm weights are stored less 1, and embeddings are scaled.
"""

from typing import Any, ClassVar

from proa_engine.layers.rotary import RopeConfig
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions, NormNames

GEMMA_NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


class Gemma2ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        types = read.layer_types(fields, read.every(2, fields))
        ropes = dict.fromkeys(read.LAYER_TYPES, read.rope(fields))
        return gemma_options(fields, types, ropes, soft_cap=fields["attn_logit_softcapping"])


def gemma_options(
    fields: read.Fields, types: tuple[str, ...], ropes: dict[str, RopeConfig], **attention: Any
) -> DecoderOptions:
    """`types` of the layers, the rotation of each type, and further options of attention."""
    read.require(fields, "use_bidirectional_attention", (False,))
    norm, scale = read.norm(fields, offset=1.0), fields["query_pre_attn_scalar"] ** -0.5
    layers = [
        LayerOptions(
            attention=read.attention(fields, rope=ropes[kind], window=window, scale=scale, **attention),
            mlp=read.gated_mlp(fields),
            norm=norm,
            norms=GEMMA_NORMS,
        )
        for kind, window in zip(types, read.windows(fields, types), strict=True)
    ]
    return DecoderOptions(
        layers=tuple(layers),
        norm=norm,
        embedding_scale=fields["hidden_size"] ** 0.5,
        logits_soft_cap=fields.get("final_logit_softcapping"),
    )
