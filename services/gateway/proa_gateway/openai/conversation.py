"""Conversation: what a model is to answer, made from the body of any API of chats.

An API brings two more things: the sampling parameters, as a `GenerationRequest`, and how the answer looks
(`answer.py`). `ConversationHandler` puts the three together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proa_gateway.openai.protocol import ChatMessage, Effort
from proa_gateway.openai.tools import Tool, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """`messages`: in the form of chat completions, tool calls and their results included.

    `template_kwargs`: the chat template's variables. `chat_template`: None: the model's own. `opens_message`: the
    prompt ends with the opening of a new message. `continues_message`: it ends within the last one.
    `includes_reasoning`: the answer shows it. `separates_reasoning`: it is not part of the answer's text.
    `thinking_token_budget`: after so many tokens it is closed.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    includes_reasoning: bool = True
    separates_reasoning: bool = True
    thinking_token_budget: int | None = None
    reasoning_effort: Effort | None = None
    documents: Sequence[Mapping[str, object]] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    chat_template: str | None = None
    opens_message: bool = True
    continues_message: bool = False

    @property
    def prompt_tools(self) -> Sequence[Tool]:
        """The tools that the model gets to know."""
        return () if self.tool_choice == "none" else self.tools
