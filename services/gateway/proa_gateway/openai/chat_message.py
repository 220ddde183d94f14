"""A chat completion's choice from the events of a message: reasoning, content and tool calls."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from proa_gateway.deltas import Delta
from proa_gateway.openai.envelope import Envelope, Usage
from proa_gateway.openai.logprobs import ChatLogprobs
from proa_gateway.parsing.events import ArgumentsDelta, CallStarted, ContentDelta, MessageEvent, ReasoningDelta


class ChatMessageChoice:
    """The `MessageChoice` of `/v1/chat/completions`. The official client assembles `event`s to what `final` returns."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        *,
        role: str,
        echo: str,
        logprobs: ChatLogprobs | None,
        token_ids: bool,
        opening_fields: Mapping[str, object],
        includes_reasoning: bool,
        names_call: bool,
        continuous_usage: bool,
    ) -> None:
        """As for `ChatChoice`. `includes_reasoning`: whether it is shown. `names_call`: `tool_choice` names the tool,
        so that a call does not change the finish reason. `continuous_usage`: the opening has the usage."""
        self._envelope = envelope
        self._index = index
        self._role = role
        self._echo = echo
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._opening_fields = opening_fields
        self._includes_reasoning = includes_reasoning
        self._names_call = names_call
        self._continuous_usage = continuous_usage
        self._has_calls = False

    def opening(self, usage: Usage) -> bytes:
        choice = self._choice(Delta(), "delta", {"role": self._role, "content": self._echo})
        shown_usage = usage if self._continuous_usage else None
        return self._envelope.event(orjson.dumps(choice), shown_usage, **self._opening_fields)

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        parts = [part for event in events if (part := self._part(event))]
        has_more = delta.token_ids or delta.logprobs or delta.finish_reason is not None
        if not parts and not has_more:
            return b""
        *firsts, last = parts or [{}]
        choices = [self._choice(Delta(), "delta", part) for part in firsts]
        choices.append(self._choice(delta, "delta", last))
        return b"".join(self._envelope.event(orjson.dumps(choice), usage) for choice in choices)

    def final(self, events: Sequence[MessageEvent], delta: Delta) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        content, reasoning = self._echo, ""
        for event in events:
            match event:
                case ReasoningDelta(text) if self._includes_reasoning:
                    reasoning += text
                case ContentDelta(text):
                    content += text
                case CallStarted(_, id, name):
                    calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
                case ArgumentsDelta(index, text):
                    calls[index]["function"]["arguments"] += text
        self._has_calls = bool(calls)
        message: dict[str, Any] = {"role": self._role, "content": content or None}
        message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
        message |= dict.fromkeys(("reasoning", "reasoning_content"), reasoning or None)
        if calls:
            message["tool_calls"] = calls
        return {"token_ids": None, **self._choice(delta, "message", message)}

    def _part(self, event: MessageEvent) -> dict[str, Any] | None:
        """The event as the `delta` of a chunk. None: it is not shown."""
        match event:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text) if self._includes_reasoning:
                return {"reasoning_content": text, "reasoning": text}
            case CallStarted(index, id, name):
                self._has_calls = True
                call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
                return {"tool_calls": [call]}
            case ArgumentsDelta(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return None

    def _choice(self, delta: Delta, name: str, message: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self._index, name: message, "logprobs": None, "finish_reason": None}
        if self._logprobs is not None and (delta.logprobs or name == "message"):
            choice["logprobs"] = self._logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            ends_with_call = self._has_calls and not self._names_call and delta.finish_reason == "stop"
            choice["finish_reason"] = "tool_calls" if ends_with_call else delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        return choice | {"token_ids": delta.token_ids} if self._token_ids else choice
