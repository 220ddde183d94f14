"""Prompt embeddings of a request: checks of their values, and their hashes. Time: in proportion to their bytes."""

from dataclasses import replace

import numpy as np

from proa.contract import EmbeddingType, EngineCoreRequest, PromptEmbeds
from proa.contract.prompt_embeds import hashed

# Of the types whose values have 16 bits: the bits of the exponent, which are all set in infinities and NaNs.
_EXPONENTS = {EmbeddingType.FLOAT16: 0x7C00, EmbeddingType.BFLOAT16: 0x7F80}


def with_hashes(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request with the hashes of its prompt embeddings, whose sizes are checked. Raises `ValueError` if a
    value is not finite."""
    if not request.prompt_embeds:
        return request
    for index, embeds in enumerate(request.prompt_embeds):
        if not _is_finite(embeds):
            raise ValueError(f"piece {index} of the prompt's embeddings has a value that is infinite or not a number")
    return replace(request, prompt_embeds=tuple(map(hashed, request.prompt_embeds)))


def _is_finite(embeds: PromptEmbeds) -> bool:
    if embeds.type is EmbeddingType.FLOAT32:
        return bool(np.isfinite(np.frombuffer(embeds.values, "<f4")).all())
    exponent = _EXPONENTS[embeds.type]
    return bool(((np.frombuffer(embeds.values, "<u2") & exponent) != exponent).all())
