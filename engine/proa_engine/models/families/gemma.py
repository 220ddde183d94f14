"""Gemma 2 and 3: norms before and after attention and the feed-forward layer, windows in most layers.

Norm weights are stored less 1, and embeddings are scaled.
"""

from typing import Any, ClassVar

from proa_engine.layers.attention import QkNorm
from proa_engine.layers.rotary import RopeConfig
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM, ImageReadingDecoder
from proa_engine.models.decoder_layer import LayerOptions, NormNames
from proa_engine.models.families.gemma_vision import read_gemma_vision

GEMMA_NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Gemma 2: norms before and after attention and the feed-forward layer, a window on every other layer, soft caps.

    Norm weights are stored less 1, and embeddings are scaled.
    """

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


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Gemma 3: Gemma 2 with q/k norms, and full attention in every sixth layer, which alone has a scaled rotation.

    With images, whose tokens attend to all of their image in every layer. In layers with a window, the window still
    ends a token's sight to the left: of an image wider than the window it sees a part, as in `transformers`.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "attn_logit_softcapping", ())
        types = read.layer_types(fields, read.every(fields["sliding_window_pattern"], fields))
        ropes = read.ropes(fields, sliding_theta=fields["rope_local_base_freq"])
        return gemma_options(fields, types, ropes, qk_norm=QkNorm(read.norm(fields, offset=1.0)))


class Gemma3ForConditionalGeneration(ImageReadingDecoder):
    defaults: ClassVar[read.Fields] = Gemma3ForCausalLM.defaults | {
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "image_token_index": 262_144,
        "mm_tokens_per_image": 256,
    }
    read_options = staticmethod(Gemma3ForCausalLM.read_options)
    read_images = staticmethod(read_gemma_vision)
