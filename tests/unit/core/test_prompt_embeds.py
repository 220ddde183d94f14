"""Prompt embeddings of which the engine cannot serve the request are refused with a sentence."""

from dataclasses import replace
from typing import Any

import pytest

from proa.contract import EmbeddingType, EngineCoreRequest, PoolingTask, PromptEmbeds
from proa_engine.core.admission.validation import LengthLimits, ModelLimits, check_request
from support.core import make_pooled, make_request

LIMITS = ModelLimits(
    vocab_size=100,
    lengths=LengthLimits(20),
    prompt_embeds_size=2,
    pooling_tasks=frozenset(PoolingTask),
)


def piece(offset: int, num_tokens: int, size: int = 2) -> PromptEmbeds:
    values = bytes(num_tokens * size * 4)
    return PromptEmbeds(offset=offset, num_tokens=num_tokens, type=EmbeddingType.FLOAT32, values=values)


def with_embeds(*pieces: PromptEmbeds, prompt: list[int] | None = None, **params: Any) -> EngineCoreRequest:
    return replace(make_request(prompt=prompt or [0] * 8, **params), prompt_embeds=pieces)


def test_pieces_that_follow_each_other_are_accepted() -> None:
    check_request(with_embeds(piece(1, 2), piece(3, 5), prompt=[7] + [0] * 7), LIMITS)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (with_embeds(piece(0, 8, size=3)), "must have 2 values for each token, the model's hidden size, got 3"),
        (with_embeds(piece(0, 9)), "be inside the prompt of 8 tokens"),
        (with_embeds(piece(2, 3), piece(4, 2)), "must follow the piece before it"),
        (with_embeds(piece(0, 3), prompt=[0, 5, 0]), "must all be 0"),
        (with_embeds(piece(0, 3), prompt_logprobs=0), "prompt_logprobs are not computed"),
        (with_embeds(*(piece(0, 1) for _ in range(257))), "256 pieces of embeddings, got 257"),
        (replace(make_pooled(prompt=[0]), prompt_embeds=(piece(0, 1),)), "a pooled request cannot have"),
    ],
)
def test_what_cannot_be_served_is_refused(request_: EngineCoreRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, LIMITS)


def test_an_engine_without_the_flag_refuses_them() -> None:
    with pytest.raises(ValueError, match="start it with --enable-prompt-embeds"):
        check_request(with_embeds(piece(0, 8)), replace(LIMITS, prompt_embeds_size=0))


@pytest.mark.parametrize(("num_tokens", "num_bytes"), [(0, 8), (1, 0), (3, 8), (2, 12)])
def test_values_that_do_not_divide_among_the_tokens_are_refused(num_tokens: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot have"):
        PromptEmbeds(num_tokens=num_tokens, type=EmbeddingType.FLOAT32, values=bytes(num_bytes))
