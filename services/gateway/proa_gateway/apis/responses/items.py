"""Items of a response's input: messages, calls, their results, reasoning, tools, and records of other servers' tools.
Other items are refused by their type."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    TypeAdapter,
)
from pydantic_core import PydanticCustomError

from proa_gateway.apis.responses.tools import CallName, ToolParam, ToolParams
from proa_gateway.serving.content import MAX_PARTS, ImagePart, Part, image_url, joined
from proa_gateway.serving.conversation import MAX_MESSAGES
from proa_gateway.serving.fields import Text, check_json, known_types
from proa_gateway.serving.tools.offers import Record
from proa_gateway.serving.tools.tool import call_arguments

_ITEM_TYPES = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("reasoning", "additional_tools"),
)
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


Status = Literal["in_progress", "completed", "incomplete"]


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


class ThoughtPart(BaseModel):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class MessageItem(BaseModel):
    """`status`: the last message is continued if it is the assistant's and not completed."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: Text | None = None
    status: Status | None = None

    def listed(self) -> Fields:
        answers = self.role == "assistant"
        parts = [
            output_text(part.text) if answers and isinstance(part, TextPart) else part.listed() for part in self.content
        ]
        return {"id": self.id or new_id("msg_"), "type": "message", "role": self.role, "content": parts}


class _Called(BaseModel):
    """A call by the model. `namespace`: of the function or of the custom tool."""

    call_id: Text
    name: Text
    namespace: Text | None = None
    id: Text | None = None
    status: Status | None = None

    @property
    def call_name(self) -> CallName:
        return CallName(self.name, self.namespace)

    def _listed(self, kind: str, prefix: str, **given: str) -> Fields:
        fields = {"call_id": self.call_id, **self.call_name.fields(), **given}
        return {"id": self.id or new_id(prefix), "type": kind, **fields}


class CallItem(_Called):
    """`arguments`: JSON text."""

    type: Literal["function_call"]
    arguments: Text

    def listed(self) -> Fields:
        return self._listed(self.type, "fc_", arguments=self.arguments)


class CustomCallItem(_Called):
    type: Literal["custom_tool_call"]
    input: Text

    @property
    def arguments(self) -> str:
        """Of the function that the tool is for the model, as JSON text."""
        return call_arguments(self.input)

    def listed(self) -> Fields:
        return self._listed(self.type, "ctc_", input=self.input)


class CallOutputItem(BaseModel):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Parts
    id: Text | None = None
    status: Status | None = None

    def listed(self) -> Fields:
        texts = [part.text for part in self.output if isinstance(part, TextPart)]
        has_images = len(texts) < len(self.output)
        output = [part.listed() for part in self.output] if has_images else "\n".join(texts)
        fields = {"call_id": self.call_id, "output": output}
        prefix = "fco_" if self.type == "function_call_output" else "ctco_"
        return {"id": self.id or new_id(prefix), "type": self.type, **fields}


def _dropped(value: object) -> None:
    """Raises `PydanticCustomError`."""
    if not isinstance(value, str | None):
        raise PydanticCustomError("invalid_type", "must be a string")


class ReasoningItem(BaseModel):
    """Reasoning of an earlier answer. Its `encrypted_content` is dropped: only its author can read it."""

    type: Literal["reasoning"]
    summary: Annotated[list[ThoughtPart], Field(fail_fast=True)] = []
    content: Annotated[list[ThoughtPart], Field(fail_fast=True)] | None = None
    encrypted_content: Annotated[None, BeforeValidator(_dropped, json_schema_input_type=str | None)] = None
    id: Text | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)

    def listed(self) -> Fields:
        fields = self.model_dump(include={"summary", "content"})
        return {"id": self.id or new_id("rs_"), "type": "reasoning", **fields, "encrypted_content": None}


class AdditionalToolsItem(BaseModel):
    """Tools that the model gets to know beside those of `tools`."""

    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: Annotated[ToolParams, BeforeValidator(check_json)]
    id: Text | None = None

    def listed(self) -> Fields:
        fields = self.model_dump(by_alias=True, exclude_unset=True)
        return {**fields, "id": self.id or new_id("at_")}


def additional_tools(items: Iterable["Item"]) -> list[ToolParam]:
    return [tool for item in items if isinstance(item, AdditionalToolsItem) for tool in item.tools]


RecordType = Literal[
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "tool_search_call",
    "tool_search_output",
    "local_shell_call",
    "local_shell_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "program",
    "program_output",
    "compaction",
    "compaction_summary",
]


class RecordItem(Record):
    """Each is the assistant's text in the prompt. Compactions are here for their readable fields, if they have any."""

    type: RecordType

    def listed(self) -> Fields:
        fields = self.model_dump()
        return {**fields, "id": fields.get("id") or new_id("item_")}


def is_unreadable_compaction(item: "Item") -> bool:
    return isinstance(item, RecordItem) and item.type in ("compaction", "compaction_summary") and not item.text


def _with_type(value: object) -> object:
    """Messages may have no type."""
    if not isinstance(value, dict):
        return value
    if value.get("type") == "item_reference":
        raise PydanticCustomError("unsupported_parameter", "has the type 'item_reference': send the item itself")
    return {"type": "message", **value} if "role" in value else value


Item = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | AdditionalToolsItem | RecordItem
_Item = Annotated[
    Annotated[Item, Field(discriminator="type")],
    known_types(*_ITEM_TYPES, *get_args(RecordType)),
    BeforeValidator(_with_type),
]


def _as_items(value: object) -> object:
    if not isinstance(value, (str, list)):
        raise PydanticCustomError("invalid_value", "must be a string or a list of items")
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


InputItems = Annotated[
    list[_Item],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_as_items, json_schema_input_type=str | list[_Item]),
]
"""The text of a user's message, or items."""
_STORED: TypeAdapter[list[Item]] = TypeAdapter(list[_Item])


def parsed(items: Iterable[Fields]) -> list[Item]:
    """Parse items that were stored by `listed`."""
    return _STORED.validate_python(list(items))


def listed(items: Iterable[Item]) -> list[Fields]:
    """The items as clients get them, each with an id. Records and tools are as they were sent."""
    return [
        item.listed()
        if isinstance(item, RecordItem | AdditionalToolsItem)
        else {**item.listed(), "status": item.status or "completed"}
        for item in items
    ]
