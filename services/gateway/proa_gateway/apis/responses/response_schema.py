"""Bodies of the Responses API, for the OpenAPI document. They are written without these classes."""

from typing import Any, Literal

from pydantic import BaseModel

_EVENTS = "Events from `response.created` to `response.completed`, `response.incomplete` or `response.failed`."


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"]
    status: Literal["completed", "incomplete"]
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class _OutputCalled(BaseModel):
    """`namespace`: of the function or of the custom tool; only there if it has one."""

    id: str
    call_id: str
    name: str
    namespace: str | None = None
    status: Literal["completed", "incomplete"]


class OutputCall(_OutputCalled):
    """`arguments`: JSON text."""

    type: Literal["function_call"]
    arguments: str


class OutputCustomCall(_OutputCalled):
    type: Literal["custom_tool_call"]
    input: str


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(BaseModel):
    """A response. The request's fields are part of it."""

    id: str
    object: Literal["response"]
    created_at: int  # Unix seconds, like `completed_at`
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall]
    error: dict[str, Any] | None  # why the status is `failed`; null for others
    incomplete_details: dict[str, str] | None  # why the status is `incomplete`; null for others
    usage: ResponseUsage | None  # null before its end, and if it failed


class ItemList(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool


RESPONSE: dict[str, Any] = {"model": ResponseObject, "description": "The response."}
RESPONSE_OR_EVENTS: dict[str, Any] = {
    **RESPONSE,
    "content": {"text/event-stream": {"schema": {"type": "string", "description": _EVENTS}}},
}
ITEM_LIST: dict[str, Any] = {"model": ItemList, "description": "The items."}
DELETED: dict[str, Any] = {"model": DeletedResponse, "description": "The response is no longer stored."}
