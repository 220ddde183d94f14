"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from proa_gateway.messages.blocks import MessageParam, TextBlocks, ToolChoiceParam, ToolField
from proa_gateway.openai.constraint_fields import JsonText
from proa_gateway.openai.fields import Text
from proa_gateway.openai.protocol import MAX_MESSAGES, Count, Effort, ModelName, Probability
from proa_gateway.openai.refused_fields import Refused
from proa_gateway.openai.tools import MAX_TOOLS

_KEEPS_ALL = tuple({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in ("all", {"type": "all"}))
"""Claude Code sends the first: all thinking stays in the prompt."""
REFUSED = {
    "container": Refused("nothing is executed here"),
    "mcp_servers": Refused("no servers are called"),
    "context_management": Refused("messages are never dropped", neutral=({"edits": []}, *_KEEPS_ALL)),
    "output_format": Refused("use output_config.format"),
    "prefill": Refused("end the messages with one of the assistant"),
}
NO_EFFECT = frozenset(
    {"cache_control", "service_tier", "speed", "inference_geo", "diagnostics", "user_profile_id", "workspace_id"}
)


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
    """What a prompt is made from."""

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
    def extra_fields(self) -> dict[str, Any]:
        """The fields that this class does not have, without those that change nothing."""
        return {name: value for name, value in self.__pydantic_extra__.items() if name not in NO_EFFECT}


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
