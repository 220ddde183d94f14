"""The fields that the endpoints of pooled values share, and the types of their texts."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.serving.conversation import Messages
from proa_gateway.serving.envelope import UsageInfo
from proa_gateway.serving.fields import (
    MAX_PROMPTS,
    Prompts,
    RequestFields,
    TemplateVariables,
    Text,
    check_text,
)
from proa_gateway.serving.ignored_fields import REFUSED as REFUSED_BY_ALL
from proa_gateway.serving.ignored_fields import Refused

_STRING = {"type": "string"}
_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": _STRING},
    "required": ["type", "text"],
}
_TEXT = {
    "anyOf": [
        _STRING,
        {"type": "object", "properties": {"text": _STRING}, "required": ["text"], "additionalProperties": False},
        {
            "type": "object",
            "properties": {"content": {"type": "array", "items": _PART, "minItems": 1, "maxItems": 1}},
            "required": ["content"],
            "additionalProperties": False,
        },
    ]
}
_LIST: dict[str, Any] = {"type": "array", "items": _TEXT, "minItems": 1}
_ACTIVATION = Refused("use use_activation")
_COMMON: Mapping[str, Refused] = {
    **{name: REFUSED_BY_ALL[name] for name in ("mm_processor_kwargs", "media_io_kwargs")},
    "stream": Refused("there is one response"),
    "padding": Refused("inputs are not padded", neutral=("do_not_pad",)),
}
_INPUTS: Mapping[str, Refused] = {
    **_COMMON,
    "documents": Refused("use input"),
    "texts": Refused("use input"),
}
_LATE_CHUNKING = Refused("use /v1/embeddings")
REFUSED_IN_EMBEDDINGS: Mapping[str, Refused] = {
    **_INPUTS,
    "embedding_types": Refused("use encoding_format"),
    "output_dimension": Refused("use dimensions"),
    "input_type": Refused("write the task's prompt into the input"),
    "prompt_name": Refused("write the task's prompt into the input"),
}
REFUSED_IN_POOLING: Mapping[str, Refused] = {**REFUSED_IN_EMBEDDINGS, "late_chunking_params": _LATE_CHUNKING}
REFUSED_IN_COHERE_EMBED: Mapping[str, Refused] = {
    **_COMMON,
    "input": Refused("use texts"),
    "messages": Refused("use texts"),
    "images": Refused("only text is implemented"),
    "dimensions": Refused("use output_dimension"),
    "encoding_format": Refused("use embedding_types"),
    "truncate_prompt_tokens": Refused("use max_tokens"),
    "truncation_side": Refused("use truncate"),
}
REFUSED_IN_CLASSIFY: Mapping[str, Refused] = {
    **_INPUTS,
    "late_chunking_params": _LATE_CHUNKING,
    "softmax": _ACTIVATION,
    "activation": _ACTIVATION,
}
REFUSED_IN_SCORES: Mapping[str, Refused] = {
    **_COMMON,
    "softmax": _ACTIVATION,
    "activation": _ACTIVATION,
    "rank_fields": Refused("documents are texts"),
    "max_chunks_per_doc": Refused("a document is scored as a whole; use max_tokens_per_doc"),
    "overlap_tokens": Refused("a document is scored as a whole"),
}
REFUSED_IN_GENERATIVE_SCORING = _COMMON


def _texts(value: object) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    if not entries:
        raise PydanticCustomError("invalid_value", "must not be empty")
    if len(entries) > MAX_PROMPTS:
        raise PydanticCustomError("invalid_value", "must not have more than {limit}", {"limit": MAX_PROMPTS})
    return [_text(entry) for entry in entries]


def _text(value: object) -> str:
    """A string, `{"text": …}`, or vLLM's `{"content": [{"type": "text", "text": …}]}`."""
    if isinstance(value, dict) and value.keys() == {"content"}:
        parts = value["content"]
        value = parts[0] if isinstance(parts, list) and len(parts) == 1 else None
        if isinstance(value, dict) and value.get("type") != "text":
            raise PydanticCustomError("unsupported_parameter", "has a part that is not text: only text is supported")
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise PydanticCustomError("invalid_type", "must have strings, or objects with a text")
    return check_text(text)


ScoredText = Annotated[str, PlainValidator(_text), WithJsonSchema(_TEXT)]
"""A text, as a string or in an object."""
ScoredTexts = Annotated[list[str], PlainValidator(_texts), WithJsonSchema({"anyOf": [*_TEXT["anyOf"], _LIST]})]
"""One text or a list of them."""


class PoolingFields(RequestFields):
    """The fields that all pooling endpoints have."""

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields that the class does not have."""
        return self.__pydantic_extra__


class TruncatedFields(PoolingFields):
    """Which tokens of each input are kept, in vLLM's words."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Tokens of each input to keep. -1: as many as the model takes."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Default: right, the first are kept.")


class InputFields(TruncatedFields):
    """Either `input` has the inputs, or `messages` one chat; the fields after it are the chat template's."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["input"]}, {"required": ["messages"]}]})

    input: Prompts | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for texts, false for a chat.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Text | None = Field(None, description="Needs a gateway with --trust-request-chat-template.")
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _check_input(self) -> "InputFields":
        if (self.input is None) == (self.messages is None):
            raise PydanticCustomError("invalid_value", "must have either input or messages")
        return self


# Of responses, for the OpenAPI document.


class PooledList(BaseModel):
    id: str
    object: Literal["list"]
    created: int  # Unix seconds
    model: str
    usage: UsageInfo


class ApiVersion(BaseModel):
    version: str
