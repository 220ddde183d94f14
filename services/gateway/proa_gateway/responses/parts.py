"""The parts of an item's content: texts and images."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from proa_gateway.openai.content_parts import MAX_PARTS, ImagePart, Part, image_url, joined
from proa_gateway.openai.fields import Text, known_types

Fields = dict[str, Any]


class TextPart(BaseModel):
    """`annotations` and `logprobs` of earlier answers have no effect."""

    type: Literal["input_text", "output_text"]
    text: Text

    def listed(self) -> Fields:
        return {"type": "input_text", "text": self.text}


class InputImage(BaseModel):
    """`image_url`: a data URL, or one to fetch. `detail` has no effect: images have the model's resolution."""

    type: Literal["input_image"]
    image_url: Annotated[str, AfterValidator(image_url)]
    detail: Literal["low", "high", "auto", "original"] | None = None

    def listed(self) -> Fields:
        return {"type": "input_image", "image_url": self.image_url, "detail": self.detail or "auto"}


def _refuse_file(value: object) -> object:
    if isinstance(value, dict) and value.get("type") == "input_image" and value.get("file_id") is not None:
        raise PydanticCustomError("unsupported_parameter", "has a file_id: files are not stored; use image_url")
    return value


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Part = Annotated[
    Annotated[TextPart | InputImage, Field(discriminator="type")],
    known_types("input_text", "output_text", "input_image"),
    BeforeValidator(_refuse_file),
]
Parts = Annotated[
    list[_Part],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(_as_parts, json_schema_input_type=str | list[_Part]),
]
"""Text, or parts with texts and images."""


def content_of(parts: Sequence[TextPart | InputImage], path: str) -> str | list[Part]:
    """The content of a chat's message. `path`: of the parts in the body; empty: a previous response has them."""

    def image(index: int, part: InputImage) -> ImagePart:
        return ImagePart(part.image_url, f"{path}[{index}].image_url" if path else "previous_response_id")

    return joined(part.text if isinstance(part, TextPart) else image(index, part) for index, part in enumerate(parts))


def output_text(text: str, logprobs: Iterable[Fields] = ()) -> Fields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
