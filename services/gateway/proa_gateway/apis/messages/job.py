"""Messages: converts their requests to the conversations and parameters that all APIs of chats share."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from proa_gateway.apis.messages.protocol import (
    REFUSED,
    CompactionBlock,
    ContentBlock,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessageParam,
    MessagesRequest,
    RecordBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoiceParam,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from proa_gateway.apis.messages.render import MessagesRenderer
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.parsing.format import NamedTool
from proa_gateway.serving.content import ImagePart, joined
from proa_gateway.serving.conversation import ChatMessage, Conversation, ReasoningFields
from proa_gateway.serving.conversation_call import ConversationCall, ConversationReader
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.job import ApiSettings, Endpoint
from proa_gateway.serving.tools.tool import Tool, ToolChoice

MESSAGES = Endpoint("/v1/messages", "chat", "msg_", REFUSED)
BILLING: Final = "x-anthropic-billing-header:"
"""Begins the line that Claude Code puts before its system prompt. It differs in each request, so no prompt would have a
prefix of an earlier one."""


def messages_call(body: MessagesRequest, settings: ApiSettings, request_id: str) -> ConversationCall:
    """Make the call of a message. `request_id`: for errors. Raises `InvalidRequest`."""
    request, conversation = generation_request(body), conversation_of(body)
    return ConversationCall(
        endpoint=MESSAGES,
        fields=request,
        session_id=body.metadata.user_id if body.metadata else None,
        extra_fields=body.extra_fields,
        warnings=body.warnings,
        settings=settings,
        reader=_reader(body, conversation, request, settings),
        renderer=lambda chat: partial(
            MessagesRenderer,
            chat.model.name,
            request_id,
            includes_reasoning=conversation.includes_reasoning,
            ends_at_context=len(chat.prompt.token_ids) + body.max_tokens > chat.model.info.max_model_len,
        ),
    )


async def count_tokens(body: CountTokensRequest, settings: ApiSettings, model: ServedModel) -> int:
    """Return the number of the prompt's tokens. Raises `InvalidRequest`."""
    reader = _reader(body, conversation_of(body), GenerationRequest.model_validate({}), settings)
    return len(await reader.count(model))


def _reader(
    body: CountTokensRequest, conversation: Conversation, request: GenerationRequest, settings: ApiSettings
) -> ConversationReader:
    thinking = None if body.thinking is None else body.thinking.is_on
    return ConversationReader(
        conversation=conversation,
        request=request,
        settings=settings,
        max_tokens=request.max_tokens,
        reasoning_fields=ReasoningFields("output_config.effort", thinking, "thinking"),
    )


def generation_request(body: MessagesRequest) -> GenerationRequest:
    """Return the sampling parameters and the constraint of the output under OpenAI's names."""
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
    """Return the request's conversation. If its last message is the assistant's, the model continues it. Raises
    `InvalidRequest` if no message has content."""
    messages = [*_system(body), *_history(body.messages)]
    if not messages:
        raise InvalidRequest("messages: all of them are empty.", param="messages")
    continues = messages[-1].role == "assistant"
    thinking, choice = body.thinking, body.tool_choice
    return Conversation(
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or () if isinstance(tool, ToolParam)],
        left_out_tools=body.offered_tools,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        includes_reasoning=not (thinking and thinking.display == "omitted"),
        reasoning_effort=body.output_config.effort if body.output_config else None,
        opens_message=not continues,
        continues_message=continues,
    )


def _system(body: CountTokensRequest) -> list[ChatMessage]:
    texts = [block.text for block in body.system or ()]
    if texts and texts[0].startswith(BILLING):
        texts = [*filter(None, [texts[0].partition("\n")[2].lstrip()]), *texts[1:]]
    return [_message(role="system", content="\n".join(texts))] if texts else []


def _history(messages: Iterable[MessageParam]) -> Iterator[ChatMessage]:
    for index, message in enumerate(messages):
        yield from _chat_messages(message, f"messages[{index}].content")


def _chat_messages(message: MessageParam, path: str) -> Iterator[ChatMessage]:
    """Convert a message. Results of calls become messages of their own, before the text that comes with them. Their
    images become messages of the user, as in vLLM, because most chat templates render no others."""
    blocks = [(f"{path}[{index}]", block) for index, block in enumerate(message.content)]
    for block_path, block in blocks:
        if isinstance(block, ToolResultBlock):
            yield _message(role="tool", tool_call_id=block.tool_use_id, content=_result(block))
            results = enumerate(block.content)
            images = [_image(each, f"{block_path}.content[{i}]") for i, each in results if isinstance(each, ImageBlock)]
            if images:
                yield _message(role="user", content=images)
    if rest := [(block_path, block) for block_path, block in blocks if not isinstance(block, ToolResultBlock)]:
        yield from _chat_message(message.role, rest)


def _chat_message(role: str, blocks: Sequence[tuple[str, ContentBlock]]) -> Iterator[ChatMessage]:
    """Convert a message of these blocks, given with their paths in the body. Yields none if nothing in it can be
    read."""
    parts = list(_parts(blocks))
    thoughts = [block.thinking for _, block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for _, block in blocks if isinstance(block, ToolUseBlock)]
    fields: dict[str, Any] = {"role": role, "content": joined(parts) if parts else None}
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts)
    if calls:
        fields["tool_calls"] = [{"id": each.id, "function": _function(each)} for each in calls]
    if parts or thoughts or calls:
        yield _message(**fields)


def _parts(blocks: Iterable[tuple[str, ContentBlock]]) -> Iterator[str | ImagePart]:
    """Texts, records as texts, and images."""
    for path, block in blocks:
        match block:
            case ImageBlock():
                yield _image(block, path)
            case TextBlock() | DocumentBlock():
                yield block.text
            case CompactionBlock() | RecordBlock() if block.text:
                yield block.text


def _image(block: ImageBlock, path: str) -> ImagePart:
    return ImagePart(block.source.as_url, f"{path}.source")


def _message(**fields: object) -> ChatMessage:
    return ChatMessage.model_validate(fields)


def _function(block: ToolUseBlock) -> dict[str, str]:
    return {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}


def _result(block: ToolResultBlock) -> str:
    text = "\n".join(part.text for part in block.content if not isinstance(part, ImageBlock))
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
