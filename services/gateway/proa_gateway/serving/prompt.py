"""A prompt's text and images to token ids. A text that cannot fit is refused, or cut, before it is encoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from proa.contract import Image, ImageInput
from proa.image.placeholders import expand_placeholders, place_media
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import ContextOverflow, InvalidRequest, UnsupportedField
from proa_gateway.images.loader import ImageLoader, ImageSource
from proa_gateway.serving.content import ImagePart
from proa_gateway.serving.conversation import ChatMessage
from proa_gateway.serving.generation_request import GenerationRequest

MAX_COUNTED_TOKENS: Final = 1_048_576
"""Of a text that is only counted, or whose tokens are returned."""
CUT_SLACK: Final = 1024  # characters around a cut, whose tokens depend on it


async def check_text_fits(text: str, model: ServedModel, limit: int, param: str) -> None:
    """Raises `ContextOverflow` for a text that certainly has more than `limit` tokens. Others may too."""
    if await model.tokenizer.has_more_tokens(text, limit):
        message = (
            f"This model's maximum context length is {limit} tokens. However, the prompt's {len(text)} characters have "
            "more. Please reduce the length of the input prompt."
        )
        raise ContextOverflow(message, param=param)


def cut_text(text: str, request: GenerationRequest, model: ServedModel) -> str:
    """Return the text without characters that `truncate_prompt_tokens` cuts off in any case."""
    if request.truncate_prompt_tokens is None:
        return text
    kept = request.truncate_prompt_tokens if request.truncate_prompt_tokens >= 0 else model.info.max_model_len
    size = min(kept, model.info.max_model_len) * model.tokenizer.longest_token + CUT_SLACK
    return text[:size] if request.truncation_side == "right" else text[-size:]


async def encode_text(
    text: str, request: GenerationRequest, model: ServedModel, *, add_special_tokens: bool, param: str
) -> Sequence[int]:
    """Encode a text. With truncation, return at least the token ids that are kept, otherwise all. Raises
    `ContextOverflow`."""
    if request.truncate_prompt_tokens is None:
        await check_text_fits(text, model, model.info.max_model_len, param)
    else:
        text = cut_text(text, request, model)
    return await model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The prepared images of one prompt, in their order. `param`: the field that errors about their places name."""

    images: Sequence[Image]
    input: ImageInput
    param: str

    def expand(self, text: str) -> str:
        """The rendered prompt with the images' tokens. Raises `InvalidRequest` if it has a placeholder too many, as one
        in a message's text, or the chat template left out an image."""
        try:
            return expand_placeholders(text, [image.num_tokens for image in self.images], self.input)
        except ValueError as error:
            raise InvalidRequest(f"{self.param}: {error}.", param=self.param) from error

    def place(self, token_ids: Sequence[int]) -> tuple[Image, ...]:
        """Raises `InvalidRequest` if the prompt has tokens of images at other places, as of a message's text."""
        try:
            return place_media(token_ids, self.images, self.input)
        except ValueError as error:
            raise InvalidRequest(f"{self.param}: {error}.", param=self.param) from error


def image_parts(messages: Sequence[ChatMessage], param: str) -> Iterator[ImagePart]:
    """Yield the messages' images in order, each with the field that errors name. `param`: the field of the messages."""
    for index, message in enumerate(messages):
        for part_index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                yield part if part.param else replace(part, param=f"{param}[{index}].content[{part_index}]")


async def load_images(
    parts: Sequence[ImagePart], model: ServedModel, loader: ImageLoader | None, *, param: str
) -> PromptImages:
    """Load and prepare the images of a prompt, at least one. `loader` None: images are refused. `param`: path of the
    messages in the body. Raises `InvalidRequest` and `Overloaded`."""
    image_input, param_of_first = model.info.images, parts[0].param
    if image_input is None or loader is None:
        message = f"{param_of_first}: the model {model.name!r} does not read images."
        raise UnsupportedField(message, param=param_of_first)
    sources = (ImageSource(part.url, part.param) for part in parts)
    return PromptImages(await loader.load(sources, image_input), image_input, param)


def images_kept(
    images: Sequence[Image], num_tokens: int, num_kept: int, side: Literal["left", "right"]
) -> tuple[Image, ...]:
    """The images of a prompt that is cut from `num_tokens` to `num_kept` tokens at this side. Raises `InvalidRequest`
    if tokens of an image are cut off."""
    start = num_tokens - num_kept if side == "left" else 0
    if any(image.offset < start or image.end > start + num_kept for image in images):
        message = "truncate_prompt_tokens would cut off an image: send fewer or smaller images, or keep more tokens."
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    return tuple(replace(image, offset=image.offset - start) for image in images)


def truncated(
    token_ids: Sequence[int], request: GenerationRequest, model: ServedModel, *, max_tokens: int | None
) -> Sequence[int]:
    """The prompt's ids that `truncate_prompt_tokens` keeps. Raises `InvalidRequest`."""
    limit, kept = model.info.max_model_len, request.truncate_prompt_tokens
    if kept is None:
        return token_ids
    if kept > limit:
        message = f"truncate_prompt_tokens must not be above the model's context length of {limit}, got {kept}."
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    if kept < 0:
        kept = max(1, limit - (max_tokens or 1))
    return token_ids[:kept] if request.truncation_side == "right" else token_ids[max(0, len(token_ids) - kept) :]


def check_context(num_prompt_tokens: int, model: ServedModel, param: str) -> None:
    """Raises `ContextOverflow` if there is no room for an output. `max_tokens` may be above what is left, as in vLLM:
    the output ends at the context then. Coding agents ask for 32,000 tokens whatever the context. `param` names the
    field that holds the prompt."""
    limit = model.info.max_model_len
    if num_prompt_tokens < limit:
        return
    raise ContextOverflow(
        f"This model's maximum context length is {limit} tokens. However, your prompt has {num_prompt_tokens} tokens, "
        "which leaves no room for an output. Please reduce the length of the input prompt.",
        param=param,
    )
