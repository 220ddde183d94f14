"""The images of a conversation: from the parts of its messages to their places among the prompt's tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from proa.contract import Image, ImageInput
from proa.image.placeholders import expand_placeholders, place_images
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.images.loader import ImageLoader, ImageSource
from proa_gateway.serving.content import ImagePart
from proa_gateway.serving.conversation import ChatMessage


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The prepared images of one prompt, in their order; maybe none. `param`: the field that errors about their places
    name."""

    images: Sequence[Image]
    input: ImageInput | None
    param: str

    @property
    def placeholder(self) -> str:
        """What a chat template writes for an image."""
        return self.input.placeholder if self.input is not None else ""

    def expand(self, text: str) -> str:
        """The rendered prompt with the images' tokens. Raises `InvalidRequest` if it has a placeholder too many, as one
        in a message's text, or the chat template left out an image."""
        if self.input is None:
            return text
        try:
            return expand_placeholders(text, [image.num_tokens for image in self.images], self.input)
        except ValueError as error:
            raise InvalidRequest(f"{self.param}: {error}.", param=self.param) from error

    def place(self, token_ids: Sequence[int]) -> tuple[Image, ...]:
        """Raises `InvalidRequest` if the prompt has tokens of images at other places, as of a message's text."""
        if self.input is None:
            return ()
        try:
            return place_images(token_ids, self.images, self.input)
        except ValueError as error:
            raise InvalidRequest(f"{self.param}: {error}.", param=self.param) from error


def image_parts(messages: Sequence[ChatMessage], param: str) -> Iterator[ImagePart]:
    """In their order, each with the field that errors name. `param`: of the messages."""
    for index, message in enumerate(messages):
        for part_index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                yield part if part.param else replace(part, param=f"{param}[{index}].content[{part_index}]")


async def load_images(
    parts: Iterator[ImagePart], model: ServedModel, loader: ImageLoader | None, *, param: str
) -> PromptImages:
    """`loader` None: no images are read. `param`: of the messages. Raises `InvalidRequest`, and `Overloaded`."""
    first = next(parts, None)
    if first is None:
        return PromptImages((), None, param)
    image_input = model.info.images
    if image_input is None or loader is None:
        message = f"{first.param}: the model {model.name!r} does not read images."
        raise UnsupportedField(message, param=first.param)
    sources = (ImageSource(part.url, part.param) for part in chain((first,), parts))
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
