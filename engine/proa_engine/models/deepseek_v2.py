"""DeepSeek-V2 and V2-Lite: latent attention, and experts chosen by a softmax within the best groups."""

from proa_engine.kernels.moe_route import Routing
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.latent import latent_decoder


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "topk_method", ("greedy", "group_limited_greedy"))
        by_group = fields.get("topk_method") == "group_limited_greedy"
        routing = Routing(
            fields["num_experts_per_tok"],
            normalize=False,  # as in the model's own code, whatever norm_topk_prob is
            num_groups=fields["n_group"] if by_group else 1,
            num_chosen_groups=fields["topk_group"] if by_group else 1,
            group_best=1,
            scale=fields.get("routed_scaling_factor", 1.0),
        )
        num_dense = fields.get("first_k_dense_replace", 0)
        return latent_decoder(fields, routing, [layer >= num_dense for layer in range(fields["num_hidden_layers"])])
