"""Ministral 3: Mistral whose queries grow with the logarithm of their position (a field of `rope_parameters`).

Of checkpoints that also read images, only the text model is loaded.
"""

from typing import ClassVar

from proa_engine.models import fields as read
from proa_engine.models.mistral import MistralForCausalLM


class Ministral3ForCausalLM(MistralForCausalLM):
    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """Ministral 3, or Mistral Small 3, with an image encoder, which is not loaded."""
