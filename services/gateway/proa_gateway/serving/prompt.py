"""A prompt's text, images and audios to token ids. A text that cannot fit is refused, or cut, before it is encoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from proa.contract import Audio, AudioInput, Image, ImageInput
from proa.image.placeholders import expand_placeholders, place_media
from proa_gateway.audio.parts import AudioPartLoader, AudioSource
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import ContextOverflow, InvalidRequest, UnsupportedField
from proa_gateway.images.loader import ImageLoader, ImageSource
from proa_gateway.serving.content import AudioPart, ImagePart
from proa_gateway.serving.conversation import ChatMessage
from proa_gateway.serving.generation_request import GenerationRequest

T = TypeVar("T", Image, Audio)
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
class MediaItems:
    """A prompt's images or audios, with their offsets once they have a place."""

    images: tuple[Image, ...] = ()
    audios: tuple[Audio, ...] = ()

    def kept(self, num_tokens: int, num_kept: int, side: Literal["left", "right"]) -> "MediaItems":
        """Those of a prompt that is cut from `num_tokens` to `num_kept` tokens at this side. Raises `InvalidRequest`
        if tokens of one are cut off."""
        start = num_tokens - num_kept if side == "left" else 0
        return MediaItems(_moved(self.images, start, num_kept, "image"), _moved(self.audios, start, num_kept, "audio"))


NO_MEDIA: Final = MediaItems()


def _moved(media: Sequence[T], start: int, num_kept: int, name: str) -> tuple[T, ...]:
    if any(each.offset < start or each.end > start + num_kept for each in media):
        message = f"truncate_prompt_tokens would cut off an {name}: send fewer or smaller {name}s, or keep more tokens."
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    return tuple(replace(each, offset=each.offset - start) for each in media)


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """The prepared images of one prompt, or its audios, in their order. `param`: the field that errors about their
    places name."""

    media: MediaItems
    input: ImageInput | AudioInput
    param: str

    def expand(self, text: str) -> str:
        """The rendered prompt with the tokens of its images or audios. Raises `InvalidRequest` if it has a placeholder
        too many, as one in a message's text, or the chat template left out an image or an audio."""
        try:
            return expand_placeholders(text, self.media.images or self.media.audios, self.input)
        except ValueError as error:
            raise InvalidRequest(f"{self.param}: {error}.", param=self.param) from error

    def place(self, token_ids: Sequence[int]) -> MediaItems:
        """Raises `InvalidRequest` if the prompt has their tokens at other places, as of a message's text."""
        try:
            if self.media.audios:
                return MediaItems(audios=place_media(token_ids, self.media.audios, self.input))
            return MediaItems(place_media(token_ids, self.media.images, self.input))
        except ValueError as error:
            raise InvalidRequest(f"{self.param}: {error}.", param=self.param) from error


def media_parts(messages: Sequence[ChatMessage], param: str) -> Iterator[ImagePart | AudioPart]:
    """Yield the messages' images and audios in order, each with the field that errors name. `param`: the field of the
    messages."""
    for index, message in enumerate(messages):
        for part_index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart | AudioPart):
                yield part if part.param else replace(part, param=f"{param}[{index}].content[{part_index}]")


async def load_media(
    parts: Sequence[ImagePart | AudioPart],
    model: ServedModel,
    images: ImageLoader | None,
    audios: AudioPartLoader | None,
    *,
    param: str,
) -> PromptMedia:
    """Load and prepare the images or the audios of a prompt, at least one. `images`, `audios` None: they are refused.
    `param`: path of the messages in the body. Raises `InvalidRequest` and `Overloaded`."""
    of_images = [ImageSource(part.url, part.param) for part in parts if isinstance(part, ImagePart)]
    of_audios = [AudioSource(part.url, part.param) for part in parts if isinstance(part, AudioPart)]
    image_input, audio_input = model.info.images, model.info.audios
    if of_images and (image_input is None or images is None):
        raise _not_read(of_images[0].param, model, "images")
    if of_audios and (audio_input is None or audios is None):
        raise _not_read(of_audios[0].param, model, "audio")
    if of_images and of_audios:
        message = f"{of_audios[0].param}: a prompt can have images or audio, not both."
        raise UnsupportedField(message, param=of_audios[0].param)
    if of_audios:
        assert audio_input is not None
        assert audios is not None
        return PromptMedia(MediaItems(audios=await audios.load(of_audios, audio_input)), audio_input, param)
    assert image_input is not None
    assert images is not None
    return PromptMedia(MediaItems(await images.load(of_images, image_input)), image_input, param)


def _not_read(param: str, model: ServedModel, name: str) -> UnsupportedField:
    return UnsupportedField(f"{param}: the model {model.name!r} does not read {name}.", param=param)


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
