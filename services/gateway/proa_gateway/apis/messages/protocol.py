"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`.

A content block of another type is refused by its name, a tool of another type is left out.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag
from pydantic_core import PydanticCustomError

from proa_gateway.serving.conversation import MAX_MESSAGES
from proa_gateway.serving.fields import Count, Effort, ModelName, Probability, TemplateValue, Text, known_types
from proa_gateway.serving.ignored_fields import Refused
from proa_gateway.serving.structured_outputs import JsonText
from proa_gateway.serving.tools.offers import (
    UNREADABLE_COMPACTION,
    Offered,
    OfferedTool,
    Record,
    by_type,
    offered_fields,
)
from proa_gateway.serving.tools.tool import MAX_TOOLS, ToolName

MAX_BLOCKS = 1024  # of a message
_KEEPS_ALL = tuple({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in ("all", {"type": "all"}))
"""Claude Code sends the first: all thinking stays in the prompt."""
REFUSED = {
    "container": Refused("nothing is executed here"),
    "context_management": Refused("messages are never dropped", neutral=({"edits": []}, *_KEEPS_ALL)),
    "output_format": Refused("use output_config.format"),
    "prefill": Refused("end the messages with one of the assistant"),
}
NO_EFFECT = frozenset(
    {"cache_control", "service_tier", "speed", "inference_geo", "diagnostics", "user_profile_id", "workspace_id"}
)
_EVENTS = "Events from `message_start` to `message_stop`, or an `error`; each names its type."


class TextBlock(BaseModel):
    """`cache_control` and `citations` have no effect: every prompt is cached."""

    type: Literal["text"]
    text: Text


class Base64Source(BaseModel):
    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]+$", max_length=64)]
    data: Annotated[str, Field(min_length=1)]

    @property
    def as_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(BaseModel):
    type: Literal["url"]
    url: Annotated[Text, Field(min_length=1)]

    @property
    def as_url(self) -> str:
        return self.url


class ImageBlock(BaseModel):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source | UrlSource, Field(discriminator="type")],
        known_types("base64", "url"),
    ]


class TextSource(BaseModel):
    type: Literal["text"]
    data: Text


class DocumentBlock(BaseModel):
    """A text with a title and what it is about. `citations` has no effect."""

    type: Literal["document"]
    source: Annotated[TextSource, known_types("text")]
    title: Text | None = None
    context: Text | None = None

    @property
    def text(self) -> str:
        return "\n".join(text for text in (self.title, self.context, self.source.data) if text)


class ThinkingBlock(BaseModel):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: str | None = None


class RedactedThinkingBlock(BaseModel):
    """Reasoning that only its author can read; left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(BaseModel):
    """A call by the model."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[Text, TemplateValue]


class CompactionBlock(BaseModel):
    """A summary of earlier messages. `encrypted_content` is for its author only."""

    type: Literal["compaction"]
    content: Text | None = None

    @property
    def text(self) -> str:
        return self.content or ""


RecordType = Literal[
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "tool_reference",
    "tool_addition",
    "tool_removal",
]


class RecordBlock(Record):
    """Text in the prompt."""

    type: RecordType


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_TextBlock = Annotated[TextBlock, known_types("text")]
TextBlocks = Annotated[
    list[_TextBlock],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[_TextBlock]),
]
"""Text, or blocks of it."""


_ResultBlock = Annotated[
    Annotated[TextBlock | ImageBlock | DocumentBlock | RecordBlock, Field(discriminator="type")],
    known_types("text", "image", "document", *get_args(RecordType)),
]
_ResultBlocks = Annotated[
    list[_ResultBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_ResultBlock])
]


class ToolResultBlock(BaseModel):
    """The result of a call. `is_error`: the call failed; the model is told."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: _ResultBlocks = []
    is_error: bool | None = None


ContentBlock = Annotated[
    Annotated[
        TextBlock
        | ImageBlock
        | DocumentBlock
        | ThinkingBlock
        | RedactedThinkingBlock
        | ToolUseBlock
        | ToolResultBlock
        | CompactionBlock
        | RecordBlock,
        Field(discriminator="type"),
    ],
    known_types(
        "text",
        "image",
        "document",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "compaction",
        *get_args(RecordType),
    ),
]


_Blocks = Annotated[list[ContentBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]


class MessageParam(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[_Blocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _Blocks)]


class ToolParam(BaseModel):
    """A tool that the client runs. `strict`: calls must match the schema."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: dict[Text, TemplateValue]
    strict: bool | None = None


ToolField = Annotated[Annotated[ToolParam, Tag("<tool>")] | Offered, by_type({"custom": "<tool>"}, default="custom")]


class ToolChoiceParam(BaseModel):
    """`name`: of the tool to call, with the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def model_post_init(self, context: Any, /) -> None:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("invalid_value", "must have a name if, and only if, its type is tool")


class Thinking(BaseModel):
    """`budget_tokens` has no effect. `display` omitted: the answer has no thinking blocks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_on(self) -> bool:
        return self.type != "disabled"


class JsonFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: Annotated[JsonText, Field(alias="schema")]


class OutputConfig(BaseModel):
    effort: Effort | None = None
    format: JsonFormat | None = None


class Metadata(BaseModel):
    user_id: Text | None = None


class CountTokensRequest(BaseModel):
    """The fields that the prompt is made from."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())
    __pydantic_extra__: dict[str, Any]

    model: ModelName
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def offered_tools(self) -> list[OfferedTool]:
        """The tools that are left out."""
        return [tool for tool in self.tools or () if isinstance(tool, OfferedTool)]

    @property
    def warnings(self) -> list[str]:
        """About blocks that are left out."""
        blocks = (block for message in self.messages for block in message.content)
        unreadable = any(isinstance(block, CompactionBlock) and not block.text for block in blocks)
        return [UNREADABLE_COMPACTION] if unreadable else []

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields that this class does not have, without those that change nothing, and the types of the tools that
        are left out."""
        extra = {name: value for name, value in self.__pydantic_extra__.items() if name not in NO_EFFECT}
        return extra | offered_fields(self.offered_tools)


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=64, fail_fast=True)] | None
    ) = None
    temperature: Probability | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    metadata: Metadata | None = None


# Responses, for the OpenAPI document. `render.py` writes them without these classes.


class TextContent(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingContent(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(BaseModel):
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
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Anthropic's error object."""

    type: str
    error: AnthropicErrorDetail
    request_id: str


MESSAGE_RESPONSE: dict[str, Any] = {
    "model": Message,
    "description": "The message.",
    "content": {"text/event-stream": {"schema": {"type": "string", "description": _EVENTS}}},
}
