"""What inputs and questions are made of: parts with texts, images and JSON, as the model reads them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from proa_gateway.serving.content import MAX_PARTS, ImagePart, image_url
from proa_gateway.serving.fields import NO_UNICODE, Text, check_text, known_types

MAX_QUESTIONS: Final = 400
MAX_OPTIONS: Final = 255
_MAX_LEVELS = 32  # of containers in JSON
_MAX_VALUES = 10_000  # of a part of JSON
_MAX_BYTES = 256 * 1024  # of a part of JSON, as it is written
IN_ROLE: Mapping[str, frozenset[str]] = {
    "user": frozenset({"input_text", "input_image", "input_json"}),
    "assistant": frozenset({"input_text", "output_text", "refusal"}),  # a text of its own is read as `input_text`
    "system": frozenset({"input_text"}),
    "developer": frozenset({"input_text"}),
}
IN_OUTPUTS = frozenset({"input_text", "input_image"})
_CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array", "items": {}}],
}


@dataclass(frozen=True, slots=True)
class QuestionRow:
    """What one prompt asks: a question with its options in one order. `path`: of the question in the body."""

    path: str
    content: Sequence[str | ImagePart]  # the question
    options: Sequence[str]  # the text of each, to be written behind its label


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as the model is asked it: once, or once in each of the two orders of its options. A label's place
    sways a model: of 72 facts, half of them true, SmolLM2-135M gave yes a mean probability of 0.62 as the first option
    and of 0.37 as the second, and the mean of both had the better Brier score (docs/real-model.md)."""

    path: str  # of the question in the body
    content: Sequence[str | ImagePart]
    options: Sequence[str]  # the text of each, in the body's order
    in_both_orders: bool = False

    @property
    def rows(self) -> Sequence[QuestionRow]:
        """One, or one for each order: that of `options` comes first."""
        orders = [self.options, self.options[::-1]] if self.in_both_orders else [self.options]
        return [QuestionRow(self.path, self.content, options) for options in orders]


def option_text(name: str, description: str | None) -> str:
    return f"{name}: {description}" if description else name


def written(value: object) -> str:
    """A JSON value as the model reads it: a string itself, anything else as compact JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _check_json(value: object) -> object:
    """Raises `PydanticCustomError` for JSON that is nested too deeply, or that cannot be written."""
    level = [value]
    for _ in range(_MAX_LEVELS):
        level = [each for entry in level for each in _children(entry) if type(each) is dict or type(each) is list]
        if not level:
            break
    else:
        message = "must not have more than {limit} levels of objects and arrays"
        raise PydanticCustomError("invalid_value", message, {"limit": _MAX_LEVELS})
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        reason = NO_UNICODE if "surrogate" in str(error) else "has an integer of more than 64 bits"
        raise PydanticCustomError("invalid_value", reason) from None
    return value


def _children(value: object) -> Iterable[object]:
    """What is in an object or array. A value that is neither has nothing in it."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_part(value: object) -> object:
    """Raises `PydanticCustomError` for JSON beyond the limits of a part."""
    objects = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, dict) for entry in objects):
        raise PydanticCustomError("invalid_type", "must be an object or an array of objects")
    _check_json(value)
    rest, count = [value], 0
    while rest:
        children = list(_children(rest.pop()))
        count += len(children)
        rest += children
    if count > _MAX_VALUES:
        raise PydanticCustomError("invalid_value", "must not have more than {limit} values", {"limit": _MAX_VALUES})
    if len(orjson.dumps(value)) > _MAX_BYTES:
        raise PydanticCustomError("invalid_value", "must not have more than {limit} bytes", {"limit": _MAX_BYTES})
    return value


def _json_content(value: object) -> object:
    if not isinstance(value, (str, dict, list)):
        raise PydanticCustomError("invalid_type", "must be a string, an object or an array")
    return check_text(value) if isinstance(value, str) else _check_json(value)


TextOrJson = Annotated[Any, PlainValidator(_json_content), WithJsonSchema(_CONTENT_SCHEMA)]
"""A text, or an object or array, which the model reads as compact JSON."""


class StrictModel(BaseModel):
    """Unknown fields are errors: a misspelled one would ask another question."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextContent(BaseModel):
    type: Literal["input_text", "output_text"]
    text: Text

    def content(self, path: str) -> str:
        return self.text


class RefusalContent(BaseModel):
    type: Literal["refusal"]
    refusal: Text

    def content(self, path: str) -> str:
        return self.refusal


class ImageContent(BaseModel):
    """`image_url`: a data URL, or one to fetch. `detail` has no effect: images have the model's resolution."""

    type: Literal["input_image"]
    image_url: Annotated[str, AfterValidator(image_url)]
    detail: Literal["low", "high", "auto", "original"] | None = None

    def content(self, path: str) -> ImagePart:
        return ImagePart(self.image_url, f"{path}.image_url")


class JsonContent(BaseModel):
    """An object or an array of objects, which the model reads as compact JSON."""

    type: Literal["input_json"]
    data: Annotated[
        Any,
        PlainValidator(_check_part),
        WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}),
    ]

    def content(self, path: str) -> str:
        return written(self.data)


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


PartContent = TextContent | RefusalContent | ImageContent | JsonContent
_Part = Annotated[
    Annotated[PartContent, Field(discriminator="type")],
    known_types("input_text", "output_text", "refusal", "input_image", "input_json"),
]
Parts = Annotated[
    list[_Part],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(_as_parts, json_schema_input_type=str | list[_Part]),
]
"""Text, or parts with texts, images and JSON."""


def contents(parts: Sequence[PartContent], path: str) -> Iterator[str | ImagePart]:
    """`path`: of the parts in the body, for errors about images."""
    for index, part in enumerate(parts):
        yield part.content(f"{path}[{index}]")


def check_kinds(parts: Sequence[PartContent], kinds: frozenset[str], owner: str) -> None:
    """Raises `PydanticCustomError` for a part of another kind."""
    if wrong := next((part.type for part in parts if part.type not in kinds), None):
        message = "has a part of the type {kind}, which {owner} cannot have"
        raise PydanticCustomError("unsupported_parameter", message, {"kind": repr(wrong), "owner": owner})
