"""GLM-4.5 to 4.7: experts chosen by corrected sigmoid scores, shared experts, and a rotation of half of each head."""

from typing import ClassVar

from proa_engine.layers.attention import QkNorm
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.shared_experts import decoder_with_experts, sigmoid_routing


class Glm4MoeForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        qk_norm = QkNorm(read.norm(fields)) if fields.get("use_qk_norm", False) else None
        rope = read.rope(fields, partial=True)
        attention = read.attention(fields, rope=rope, output_bias=False, qk_norm=qk_norm)
        are_sparse = [number >= fields["first_k_dense_replace"] for number in range(fields["num_hidden_layers"])]
        return decoder_with_experts(fields, attention, sigmoid_routing(fields), are_sparse, "e_score_correction_bias")
