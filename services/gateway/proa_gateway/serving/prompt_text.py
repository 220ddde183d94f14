"""A prompt's text to token ids. One that cannot fit is refused, or cut, before it is encoded."""

from collections.abc import Sequence
from typing import Final

from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import ContextOverflow
from proa_gateway.serving.generation_request import GenerationRequest

MAX_COUNTED_TOKENS: Final = 1_048_576
"""Of a text that is only counted, or whose tokens are returned."""
CUT_SLACK: Final = 1024  # characters around a cut, whose tokens depend on it


async def check_text_fits(text: str, model: ServedModel, limit: int, param: str) -> None:
    """Raises `ContextOverflow` for a text that certainly has more than `limit` tokens. Others may too."""
    if await model.tokenizer.has_more_tokens(text, limit):
        message = f"The prompt's {len(text)} characters are more than {limit} tokens"
        context = " of this model's maximum context length" if limit == model.info.max_model_len else ""
        raise ContextOverflow(f"{message}{context}. Please reduce its length.", param=param)


def cut_text(text: str, request: GenerationRequest, model: ServedModel) -> str:
    """Without what `truncate_prompt_tokens` cuts off in any case."""
    if request.truncate_prompt_tokens is None:
        return text
    kept = request.truncate_prompt_tokens if request.truncate_prompt_tokens >= 0 else model.info.max_model_len
    size = min(kept, model.info.max_model_len) * model.tokenizer.longest_token + CUT_SLACK
    return text[:size] if request.truncation_side == "right" else text[-size:]


async def encode_text(
    text: str, request: GenerationRequest, model: ServedModel, *, add_special_tokens: bool, param: str
) -> Sequence[int]:
    """All token ids of a text without truncation, else at least those that are kept. Raises `ContextOverflow`."""
    if request.truncate_prompt_tokens is None:
        await check_text_fits(text, model, model.info.max_model_len, param)
    else:
        text = cut_text(text, request, model)
    return await model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
