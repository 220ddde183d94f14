"""DeepSeek-V3 and R1: latent attention; experts chosen by corrected sigmoids within the best groups."""

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.latent import latent_decoder
from proa_engine.models.shared_experts import sigmoid_routing


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        num_dense = fields.get("first_k_dense_replace", 3)
        are_sparse = [layer >= num_dense for layer in range(fields["num_hidden_layers"])]
        return latent_decoder(fields, sigmoid_routing(fields), are_sparse, "e_score_correction_bias")
