"""OLMo 3: OLMo 2 with a sliding window on three of four layers, whose rotation is not scaled."""

from typing import ClassVar

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.olmo2 import layer_options


class Olmo3ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        types = read.layer_types(fields, read.every(4, fields))
        ropes = read.ropes(fields, sliding_theta=fields["rope_theta"])
        windows = read.windows(fields, types)
        return DecoderOptions(
            layers=tuple(
                layer_options(fields, ropes[kind], window) for kind, window in zip(types, windows, strict=True)
            ),
            norm=read.norm(fields),
        )
