"""SmolLM3: Llama whose every fourth layer does not encode positions, and may have a sliding window."""

from dataclasses import replace
from typing import ClassVar

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class SmolLM3ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"tie_word_embeddings": True, "rope_theta": 2_000_000.0}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        rope, norm = read.rope(fields), read.norm(fields)
        interval, num_layers = fields.get("no_rope_layer_interval", 4), fields["num_hidden_layers"]
        rotated = fields.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
        has_windows = fields.get("use_sliding_window", False)
        types = read.layer_types(fields, [read.kind(has_windows and not each) for each in rotated])
        windows = read.windows(fields, types) if has_windows else (None,) * num_layers
        layers = [
            LayerOptions(
                attention=read.attention(
                    fields,
                    rope=rope if is_rotated else replace(rope, type="none"),
                    window=window,
                ),
                mlp=read.gated_mlp(fields),
                norm=norm,
            )
            for is_rotated, window in zip(rotated, windows, strict=True)
        ]
        return DecoderOptions(layers=tuple(layers), norm=norm)
