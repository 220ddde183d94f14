"""Prompts whose tokens are replaced by embeddings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from proa.contract import EmbeddingType, EngineCoreRequest, PromptEmbeds
from proa_engine.prompt_embeds import with_hashes

TYPES = {
    torch.float32: EmbeddingType.FLOAT32,
    torch.float16: EmbeddingType.FLOAT16,
    torch.bfloat16: EmbeddingType.BFLOAT16,
}


@torch.inference_mode()
def input_embeddings(folder: Path, prompts: Sequence[list[int]]) -> list[Tensor]:
    """What the model's `get_input_embeddings` of `transformers` makes of each prompt, [tokens, hidden_size]."""
    from transformers import AutoModelForCausalLM

    layer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_input_embeddings()
    return [layer(torch.tensor(prompt)) for prompt in prompts]


def make_embeds(values: Tensor, offset: int = 0) -> PromptEmbeds:
    """`values` [tokens, hidden_size]"""
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    return PromptEmbeds(offset=offset, num_tokens=len(values), type=TYPES[values.dtype], values=data)


def embedded(request: EngineCoreRequest, values: Tensor, pieces: Sequence[range]) -> EngineCoreRequest:
    """The request with these pieces of its prompt, by ascending offset, as embeddings. `values` are those of all prompt
    tokens."""
    token_ids = list(request.prompt_token_ids)
    for piece in pieces:
        token_ids[piece.start : piece.stop] = [0] * len(piece)
    embeds = tuple(make_embeds(values[piece.start : piece.stop], piece.start) for piece in pieces)
    return with_hashes(replace(request, prompt_token_ids=token_ids, prompt_embeds=embeds))


def whole(request: EngineCoreRequest, values: Tensor) -> EngineCoreRequest:
    """The request with its whole prompt as embeddings."""
    return embedded(request, values, [range(len(values))])
