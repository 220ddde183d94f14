"""Conversations whose texts have no special tokens: only the chat template writes them.

A chat template writes a message's text between special tokens such as `<|im_end|>`, and the tokenizer does not know who
wrote what. So each special token in a client's text gets a `MARK` behind its first character before the template is
rendered. The tokenizer divides the text there and drops the mark. Removing the tokens instead would change what users
say about them; encoding the texts of messages by themselves would need every template to be taken apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel

from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.chat_prompt import Arguments, call_arguments
from proa_gateway.serving.conversation import ChatMessage, Conversation, FunctionCall
from proa_gateway.tokenizer import MARK, ControlTokens, Tokenizer

Change = Callable[[str], str]
# Templates may write a role within a token, as in `<|user|>`.
ROLES = frozenset({"assistant", "developer", "function", "system", "tool", "user"})


def plain_conversation(conversation: Conversation, tokenizer: Tokenizer) -> Conversation:
    """Return the conversation for the chat template, with a mark in each special token that a text of the request has.

    In an assistant's message, tokens that are not special by the tokenizer's files stay: templates look for the tags of
    reasoning there. Raises `InvalidRequest` for values that are nested too deeply.
    """
    try:
        return _plain_conversation(conversation, tokenizer)
    except RecursionError:
        raise InvalidRequest("The messages, tools or documents are nested too deeply.", param="messages") from None


def _plain_conversation(conversation: Conversation, tokenizer: Tokenizer) -> Conversation:
    change = partial(marked, tokenizer.control_tokens)
    changes = {"assistant": partial(marked, tokenizer.special_control_tokens)}
    return replace(
        conversation,
        messages=[_message(message, changes.get(message.role, change)) for message in conversation.messages],
        tools=[tool.with_texts(partial(_changed, change=change)) for tool in conversation.tools],
        documents=_changed(list(conversation.documents), change),
        template_kwargs=_changed(dict(conversation.template_kwargs), change),
    )


def _message(message: ChatMessage, change: Change) -> ChatMessage:
    changed: ChatMessage = _changed(message, change)
    if message.role not in ROLES:
        changed.role = MARK.join(message.role.replace(MARK, ""))
    return changed


def _changed(value: Any, change: Change) -> Any:
    """Return a copy of a JSON value, or of a part of a request, with each text changed. Images stay as they are."""
    match value:
        case str():
            return change(value)
        case Arguments():
            return Arguments({change(name): _changed(each, change) for name, each in value.items()}, change(str(value)))
        case Mapping():
            return {change(name): _changed(each, change) for name, each in value.items()}
        case list():
            return [_changed(each, change) for each in value]
        case FunctionCall():
            # Parsed first: the JSON text may escape a token's characters.
            arguments = _changed(call_arguments(value.arguments), change)
            return value.model_copy(update={"name": change(value.name), "arguments": arguments})
        case BaseModel():
            return value.model_copy(update={name: _changed(each, change) for name, each in value})
    return value


def marked(tokens: ControlTokens, text: str) -> str:
    """The text with a mark in each of these tokens, for `Tokenizer.encode_marked`."""
    text = text.replace(MARK, "")
    if tokens.starts is None:
        return text
    text = tokens.starts.sub(rf"\g<0>{MARK}", text)
    # Templates may strip texts, and write the next one behind them.
    end = len(text.rstrip())
    if any(text[max(0, end - size) : end] in tokens.prefixes for size in range(1, tokens.max_prefix + 1)):
        return text[:end] + MARK + text[end:]
    return text
