"""Messages requests as the conversations and parameters that all APIs of chats share."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from proa_gateway.errors import InvalidRequest
from proa_gateway.messages.blocks import (
    ContentBlock,
    MessageParam,
    TextBlock,
    ThinkingBlock,
    ToolChoiceParam,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from proa_gateway.messages.protocol import CountTokensRequest, MessagesRequest
from proa_gateway.openai.conversation import Conversation
from proa_gateway.openai.protocol import ChatMessage, GenerationRequest
from proa_gateway.openai.tools import Tool, ToolChoice
from proa_gateway.parsing.tool import NamedTool


def generation_request(body: MessagesRequest) -> GenerationRequest:
    """The sampling parameters and the constraint of the output, by OpenAI's names."""
    fields: dict[str, Any] = {
        "model": body.model,
        "stream": body.stream,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "max_tokens": body.max_tokens,
    }
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return GenerationRequest.model_validate(fields)


def conversation_of(body: CountTokensRequest) -> Conversation:
    """A last message of the assistant is continued. Raises `InvalidRequest` if there is no message with content."""
    messages = [*_system(body), *(part for message in body.messages for part in _chat_messages(message))]
    if not messages:
        raise InvalidRequest("messages: all of them are empty.", param="messages")
    continues = messages[-1].role == "assistant"
    thinking, choice = body.thinking, body.tool_choice
    return Conversation(
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        includes_reasoning=not (thinking and thinking.display == "omitted"),
        reasoning_effort=body.output_config.effort if body.output_config else None,
        opens_message=not continues,
        continues_message=continues,
    )


def _system(body: CountTokensRequest) -> list[ChatMessage]:
    if not body.system:
        return []
    return [_message(role="system", content="\n".join(block.text for block in body.system))]


def _chat_messages(message: MessageParam) -> Iterator[ChatMessage]:
    """Results of calls are messages of their own, before the text that comes with them."""
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            yield _message(role="tool", tool_call_id=block.tool_use_id, content=_result(block))
    if rest := [block for block in message.content if not isinstance(block, ToolResultBlock)]:
        yield _chat_message(message.role, rest)


def _chat_message(role: str, blocks: Sequence[ContentBlock]) -> ChatMessage:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    fields: dict[str, Any] = {"role": role, "content": "\n".join(texts) if texts else None}
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts)
    if calls:
        fields["tool_calls"] = [{"id": each.id, "function": _function(each)} for each in calls]
    return _message(**fields)


def _message(**fields: object) -> ChatMessage:
    return ChatMessage.model_validate(fields)


def _function(block: ToolUseBlock) -> dict[str, str]:
    return {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}


def _result(block: ToolResultBlock) -> str:
    text = "\n".join(part.text for part in block.content)
    return f"Error: {text}" if block.is_error else text


def _tool(tool: ToolParam) -> Tool:
    function: dict[str, object] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.description is None:
        del function["description"]
    if tool.strict is not None:
        function["strict"] = tool.strict
    return Tool.model_validate({"type": "function", "function": function})


def _tool_choice(choice: ToolChoiceParam | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    return "required" if choice.name is None else NamedTool(choice.name)
