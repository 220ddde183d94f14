"""Responses of the Messages API, for the OpenAPI document. `choice.py` writes them without these classes."""

from typing import Any, Literal

from pydantic import BaseModel


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """A message that is not streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


_EVENTS = "Events from `message_start` to `message_stop`, or an `error`; each names its type."
MESSAGE_RESPONSE: dict[str, Any] = {
    "model": Message,
    "description": "The message.",
    "content": {"text/event-stream": {"schema": {"type": "string", "description": _EVENTS}}},
}
