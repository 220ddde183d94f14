"""Granite 3: Llama with factors of the embeddings, the attention scores, the residuals and the logits."""

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class GraniteForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        layer = LayerOptions(
            attention=read.attention(fields, scale=fields.get("attention_multiplier", 1.0)),
            mlp=read.gated_mlp(fields),
            norm=read.norm(fields),
            residual_scale=fields.get("residual_multiplier", 1.0),
        )
        return DecoderOptions(
            layers=(layer,) * fields["num_hidden_layers"],
            norm=layer.norm,
            embedding_scale=fields.get("embedding_multiplier", 1.0),
            logits_scale=1 / fields.get("logits_scaling", 1.0),
        )
