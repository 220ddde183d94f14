"""Forms of chat completions' choices."""

from typing import Any

from proa_gateway.apis.chat.render import ChatForm
from proa_gateway.serving.envelope import Envelope


def plain_form(envelope: Envelope, **changes: Any) -> ChatForm:
    """Of a chat that asks for nothing special, and whose output is not parsed."""
    fields: dict[str, Any] = {
        "role": "assistant",
        "echo": "",
        "logprobs": None,
        "has_token_ids": False,
        "includes_reasoning": True,
        "names_call": False,
        "continuous_usage": False,
        "is_parsed": False,
        "may_reason": False,
    }
    return ChatForm(envelope, **fields | changes)
