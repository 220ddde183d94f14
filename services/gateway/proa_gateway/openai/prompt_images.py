"""The images of a conversation: the parts that have them, and whether the model reads them."""

from collections.abc import Sequence
from dataclasses import replace

from proa.contract import ImageInput
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.openai.content_parts import ImagePart
from proa_gateway.openai.protocol import ChatMessage


def image_parts(messages: Sequence[ChatMessage], param: str) -> list[ImagePart]:
    """In their order, each with the field that errors name. `param`: of the messages."""
    return [
        part if part.param else replace(part, param=f"{param}[{index}].content[{part_index}]")
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for part_index, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def check_images(parts: Sequence[ImagePart], model: ServedModel, max_images: int) -> ImageInput:
    """How the model reads images. `parts`: at least one. Raises `InvalidRequest`."""
    if model.info.images is None:
        message = f"{parts[0].param}: the model {model.name!r} does not read images."
        raise UnsupportedField(message, param=parts[0].param)
    if len(parts) > max_images:
        message = f"At most {max_images} image(s) may be provided in one prompt, got {len(parts)}."
        raise InvalidRequest(message, param=parts[max_images].param)
    return model.info.images
