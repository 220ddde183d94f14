"""How the response of a chat completion looks."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from proa.text import Vocabulary
from proa_gateway.apis.chat.protocol import ChatCompletionRequest
from proa_gateway.errors import GatewayError
from proa_gateway.output.deltas import Delta
from proa_gateway.parsing.events import ArgumentsDelta, CallStarted, ContentDelta, MessageEvent, ReasoningDelta
from proa_gateway.parsing.tool import NamedTool
from proa_gateway.serving.answer import CollectedChoice, EventOutlet, StreamedChoice
from proa_gateway.serving.content import text_of
from proa_gateway.serving.delta_sinks import ChoiceCollector, ChoiceStream
from proa_gateway.serving.envelope import Envelope, Prompt, Usage
from proa_gateway.serving.logprobs import ChatLogprobs
from proa_gateway.serving.message_format import MessageFormat
from proa_gateway.serving.message_sinks import MessageCollector, MessageStream
from proa_gateway.serving.rendering import _finish_fields, prompt_fields


def response_role(request: ChatCompletionRequest) -> str:
    """The role of the message that the output belongs to."""
    return "assistant" if request.opens_message else request.messages[-1].role


def echoed_text(request: ChatCompletionRequest) -> str:
    """With `echo`, the last message's text if the output belongs to the same role."""
    last = request.messages[-1]
    return text_of(last.content) if request.echo and last.role == response_role(request) else ""


class ChatChoice:
    """A choice of `/v1/chat/completions`."""

    begins_with_prompt = False

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        *,
        role: str = "assistant",
        echo: str = "",
        logprobs: ChatLogprobs | None = None,
        token_ids: bool = False,
        opening_fields: Mapping[str, object] | None = None,
    ) -> None:
        """`echo`: text before that of the output. `logprobs` None: no log probabilities. `token_ids`: whether the
        choice has them. `opening_fields`: of the first event of a stream."""
        self._envelope = envelope
        self._index = index
        self._role = role
        self._echo = echo
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._opening_fields = opening_fields or {}
        self.text_head = envelope.event_head + b'{"index":%d,"delta":{"content":' % index
        self.text_tail = b'},"logprobs":null,"finish_reason":null}' + envelope.event_tail

    def opening(self, usage: Usage | None = None) -> bytes:
        choice = {"index": self._index, "delta": None, "logprobs": None, "finish_reason": None}
        role = orjson.dumps(choice | {"delta": {"role": self._role, "content": ""}})
        opening = self._envelope.event(role, usage, **self._opening_fields)
        if self._echo:
            opening += self._envelope.event(orjson.dumps(choice | {"delta": {"content": self._echo}}), usage)
        return opening

    def event(self, delta: Delta, usage: Usage | None = None) -> bytes:
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return self._envelope.event(orjson.dumps(self._choice(delta, "delta", content)), usage)

    def final(self, delta: Delta) -> dict[str, Any]:
        message = {"role": self._role, "content": self._echo + delta.text}
        absent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        return {"token_ids": None, **self._choice(delta, "message", message | absent)}

    def _choice(self, delta: Delta, name: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs(delta.logprobs)
        choice = {"index": self._index, name: message, "logprobs": logprobs, **_finish_fields(delta)}
        return choice | {"token_ids": delta.token_ids} if self._token_ids else choice


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


class ChatAnswer:
    """The `Answer` of a chat completion."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        envelope: Envelope,
        vocabulary: Vocabulary,
        prompt: Prompt,
        message_format: MessageFormat | None,
    ) -> None:
        """`message_format`: None: all text is content."""
        self._request = request
        self._envelope = envelope
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._message_format = message_format

    @property
    def wants_tokens(self) -> bool:
        request = self._request
        return bool(request.logprobs or request.return_token_ids) or request.prompt_logprobs is not None

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> StreamedChoice:
        if self._message_format is None:
            return ChoiceStream(self._choice(index), outlet)
        return MessageStream(self._message_choice(index), self._message_format, outlet)

    def collect(self, index: int, prompt: Prompt) -> CollectedChoice:
        if self._message_format is None:
            return ChoiceCollector(self._choice(index))
        return MessageCollector(self._message_choice(index), self._message_format)

    def last_events(self, usage: Usage) -> bytes:
        return self._envelope.last_events(usage)

    def error_events(self, error: GatewayError) -> bytes:
        return self._envelope.error_events(error)

    def body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        request = self._request
        rendered = [choice.final() for choice in choices]
        fields = prompt_fields(
            self._prompt,
            choices[0].prompt_logprobs,
            self._vocabulary,
            logprobs=request.prompt_logprobs is not None,
            token_ids=bool(request.return_token_ids),
        )
        prompt_text = self._prompt.text if request.return_prompt_text else None
        return self._envelope.response(rendered, usage, **fields, prompt_text=prompt_text)

    def _choice(self, index: int) -> ChatChoice:
        request = self._request
        return ChatChoice(
            self._envelope,
            index,
            role=response_role(request),
            echo=echoed_text(request),
            logprobs=self._logprobs,
            token_ids=bool(request.return_token_ids),
            opening_fields=self._opening_fields(index),
        )

    def _message_choice(self, index: int) -> ChatMessageChoice:
        request = self._request
        return ChatMessageChoice(
            self._envelope,
            index,
            role=response_role(request),
            echo=echoed_text(request),
            logprobs=self._logprobs,
            token_ids=bool(request.return_token_ids),
            opening_fields=self._opening_fields(index),
            includes_reasoning=request.include_reasoning is not False,
            names_call=isinstance(request.tool_choice, NamedTool),
            continuous_usage=request.continuous_usage,
        )

    @property
    def _logprobs(self) -> ChatLogprobs | None:
        return self._request.chat_logprobs(self._vocabulary) if self._request.logprobs else None

    def _opening_fields(self, index: int) -> dict[str, object]:
        fields: dict[str, object] = {}
        if index == 0 and self._request.return_token_ids:
            fields["prompt_token_ids"] = list(self._prompt.token_ids)
        if index == 0 and self._request.return_prompt_text:
            fields["prompt_text"] = self._prompt.text
        return fields


class BatchChatAnswer:
    """The `Answer` of a batch that is not streamed. `answers`: of its chats."""

    def __init__(self, envelope: Envelope, answers: Sequence[ChatAnswer]) -> None:
        self._envelope = envelope
        self._answers = answers

    @property
    def wants_tokens(self) -> bool:
        return self._answers[0].wants_tokens

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> StreamedChoice:
        return self._answers[index].stream(index, prompt, outlet)

    def collect(self, index: int, prompt: Prompt) -> CollectedChoice:
        return self._answers[index].collect(index, prompt)

    def last_events(self, usage: Usage) -> bytes:
        return self._envelope.last_events(usage)

    def error_events(self, error: GatewayError) -> bytes:
        return self._envelope.error_events(error)

    def body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        return self._envelope.response([choice.final() for choice in choices], usage)
