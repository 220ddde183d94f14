"""GLM-4.7-Flash: DeepSeek-V3's layer in a size for one GPU."""

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.latent import latent_decoder
from proa_engine.models.shared_experts import sigmoid_routing


class Glm4MoeLiteForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        num_layers, num_dense = fields["num_hidden_layers"], fields.get("first_k_dense_replace", 1)
        types = fields.get("mlp_layer_types") or ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
        are_sparse = [each == "sparse" for each in types]
        return latent_decoder(fields, sigmoid_routing(fields), are_sparse, "e_score_correction_bias")
