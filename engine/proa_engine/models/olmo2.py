"""OLMo 2: norms after attention and the feed-forward layer instead of before; q and k are normalised as a whole."""

from typing import ClassVar

from proa_engine.layers.attention import QkNorm
from proa_engine.layers.rotary import RopeConfig
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions, NormNames

POST_NORM = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


class Olmo2ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        layer = layer_options(fields, read.rope(fields), None)
        return DecoderOptions(layers=(layer,) * fields["num_hidden_layers"], norm=layer.norm)


def layer_options(fields: read.Fields, rope: RopeConfig, window: int | None) -> LayerOptions:
    norm = read.norm(fields)
    return LayerOptions(
        attention=read.attention(fields, rope=rope, window=window, qk_norm=QkNorm(norm, whole=True)),
        mlp=read.gated_mlp(fields),
        norm=norm,
        norms=POST_NORM,
    )
