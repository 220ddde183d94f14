"""Qwen2 and Qwen2.5: biases on q, k and v, none on the output; upper layers may have a sliding window."""

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class Qwen2ForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        norm = read.norm(fields)
        layers = [
            LayerOptions(
                attention=read.attention(fields, qkv_bias=True, output_bias=False, window=window),
                mlp=read.gated_mlp(fields),
                norm=norm,
            )
            for window in qwen_windows(fields)
        ]
        return DecoderOptions(layers=tuple(layers), norm=norm)


def qwen_windows(fields: read.Fields) -> tuple[int | None, ...]:
    """The window of each layer; `use_sliding_window` switches all off."""
    num_layers: int = fields["num_hidden_layers"]
    if not fields.get("use_sliding_window", False):
        return (None,) * num_layers
    first = fields.get("max_window_layers", 28)
    return read.windows(fields, read.layer_types(fields, [read.kind(layer >= first) for layer in range(num_layers)]))
