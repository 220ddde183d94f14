"""Renders the responses of chat completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from proa.template_rules import text_of
from proa_gateway.apis.chat.protocol import ChatCompletionRequest
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
)
from proa_gateway.parsing.format import NamedTool
from proa_gateway.parsing.input_text import InputText
from proa_gateway.serving.choices import ChoiceRenderer, Output, Prompt, Usage
from proa_gateway.serving.content import for_template
from proa_gateway.serving.conversation_call import PreparedChat
from proa_gateway.serving.envelope import Envelope, prompt_fields
from proa_gateway.serving.generation_job import MakeRenderer
from proa_gateway.serving.job import ApiSettings
from proa_gateway.serving.logprobs import ChatLogprobs

_ABSENT = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What all choices of a response share."""

    envelope: Envelope
    role: str  # of the messages
    echo: str  # text to put before the output's
    logprobs: ChatLogprobs | None  # renders log probabilities; None: not requested
    has_token_ids: bool  # `return_token_ids` is true
    includes_reasoning: bool  # the answer shows it
    names_call: bool  # `tool_choice` names a function, so that a call does not change the finish reason
    continuous_usage: bool  # every event of a stream has the usage
    is_parsed: bool  # reasoning and calls are not part of the content
    may_reason: bool  # every delta has `reasoning_content`, which clients of DeepSeek and SGLang read without a check
    custom_tools: frozenset[str] = frozenset()  # names of the tools whose calls have an input in place of arguments


class ChatChoice:
    """One choice. OpenAI's client, given all bytes of `event`, assembles the message that `final` returns."""

    def __init__(self, form: ChatForm, index: int, opening_fields: Mapping[str, object]) -> None:
        """`opening_fields`: fields of a stream's first event."""
        self._form = form
        self._index = index
        self._opening_fields = opening_fields
        # Fields that every delta has, null where it has nothing of them.
        self._absent = {"reasoning_content": None} if form.may_reason else {}
        self._has_calls = False  # a call has started
        self._inputs: dict[int, InputText] = {}  # of the calls of custom tools
        absent = b'"reasoning_content":null,' if form.may_reason else b""
        self.text_frame = (
            form.envelope.event_head() + b'{"index":%d,"delta":{%b"content":' % (index, absent),
            b'},"logprobs":null,"finish_reason":null}' + form.envelope.event_tail(),
        )

    def opening(self, usage: Usage) -> bytes:
        form = self._form
        shown_usage = usage if form.continuous_usage else None
        delta = {"role": form.role, "content": form.echo if form.is_parsed else "", **self._absent}
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        if form.is_parsed and form.has_token_ids:
            choice["token_ids"] = []
        opening = form.envelope.event(orjson.dumps(choice), shown_usage, **self._opening_fields)
        if form.echo and not form.is_parsed:
            choice["delta"] = {"content": form.echo, **self._absent}
            opening += form.envelope.event(orjson.dumps(choice), shown_usage)
        return opening

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        parts = [part for event in events if (part := self._part(event))]
        if not parts:
            if not (delta.token_ids or delta.logprobs or delta.finish_reason is not None):
                return b""
            parts = [{}] if self._form.is_parsed or delta.finish_reason is not None else [{"content": ""}]
        *firsts, last = parts
        choices = [self._choice(Delta(), "delta", {**self._absent, **part}) for part in firsts]
        choices.append(self._choice(delta, "delta", {**self._absent, **last}))
        return b"".join(self._form.envelope.event(orjson.dumps(choice), usage) for choice in choices)

    def final(self, output: Output) -> dict[str, Any]:
        form = self._form
        calls: list[dict[str, Any]] = []
        content, reasoning = form.echo, ""
        for event in output.events:
            match event:
                case ReasoningDelta(text) if form.includes_reasoning:
                    reasoning += text
                case ContentDelta(text):
                    content += text
                case CallStarted():
                    calls.append(self._started(event))
                case ArgumentsDelta() | CallEnded():
                    for kind, field in self._more(event).items():
                        for name, text in field.items():
                            calls[event.index][kind][name] += text
        self._has_calls = bool(calls)
        message: dict[str, Any] = {"role": form.role, "content": content or (None if calls else "")}
        message |= {**_ABSENT, "reasoning": reasoning or None, "reasoning_content": reasoning or None}
        if calls:
            message["tool_calls"] = calls
        return {"token_ids": None, **self._choice(output.delta, "message", message)}

    def _part(self, event: MessageEvent) -> dict[str, Any] | None:
        """Return the event as the `delta` of a chunk; None if clients do not get such events."""
        match event:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text) if self._form.includes_reasoning:
                return {"reasoning_content": text, "reasoning": text}
            case CallStarted(index):
                self._has_calls = True
                return {"tool_calls": [{"index": index, **self._started(event)}]}
            case ArgumentsDelta(index) | CallEnded(index) if more := self._more(event):
                return {"tool_calls": [{"index": index, **more}]}
        return None

    def _started(self, call: CallStarted) -> dict[str, Any]:
        if call.name not in self._form.custom_tools:
            return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        self._inputs[call.index] = InputText()
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": ""}}

    def _more(self, event: ArgumentsDelta | CallEnded) -> dict[str, dict[str, str]]:
        """Return the fields of a call with more of its arguments or of its input; empty if there is no more."""
        text = event.text if isinstance(event, ArgumentsDelta) else ""
        if (input_text := self._inputs.get(event.index)) is None:
            return {"function": {"arguments": text}} if text else {}
        text = input_text.feed(text) if isinstance(event, ArgumentsDelta) else input_text.close()
        return {"custom": {"input": text}} if text else {}

    def _choice(self, delta: Delta, name: str, message: dict[str, Any]) -> dict[str, Any]:
        form = self._form
        choice: dict[str, Any] = {"index": self._index, name: message, "logprobs": None, "finish_reason": None}
        if form.logprobs is not None and (delta.logprobs or name == "message" or not form.is_parsed):
            choice["logprobs"] = form.logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            ends_with_call = self._has_calls and not form.names_call and delta.finish_reason == "stop"
            choice["finish_reason"] = "tool_calls" if ends_with_call else delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        return choice | {"token_ids": delta.token_ids} if form.has_token_ids else choice


class ChatRenderer:
    """The `Renderer` of one conversation's response."""

    follows_output = False

    def __init__(
        self, body: ChatCompletionRequest, chat: PreparedChat, settings: ApiSettings, id: str, created: int
    ) -> None:
        vocabulary = chat.model.tokenizer.vocabulary
        envelope = Envelope(
            id=id,
            object="chat.completion.chunk" if body.stream else "chat.completion",
            created=created,
            model=chat.model.name,
            include_usage=settings.includes_usage or body.include_usage,
        )
        role = "assistant" if body.opens_message else body.messages[-1].role
        continues_role = body.echo and body.messages[-1].role == role
        model_format, includes_reasoning = settings.formats.of(chat.model), body.include_reasoning is not False
        self._form = ChatForm(
            envelope=envelope,
            role=role,
            echo=text_of(for_template(body.messages[-1].content)) if continues_role else "",
            logprobs=body.chat_logprobs(vocabulary, as_ids=settings.tokens_as_ids) if body.logprobs else None,
            has_token_ids=bool(body.return_token_ids),
            includes_reasoning=includes_reasoning,
            names_call=isinstance(body.tool_choice, NamedTool),
            continuous_usage=settings.includes_usage or body.continuous_usage,
            is_parsed=chat.prompt.message_format is not None,
            may_reason=includes_reasoning and model_format is not None and model_format.tool_format.has_reasoning,
            custom_tools=body.custom_tools if body.tools else frozenset(),
        )
        self._body = body
        self._prompt = chat.prompt
        self._vocabulary = vocabulary
        self.wants_tokens = bool(body.logprobs or body.return_token_ids) or body.prompt_logprobs is not None
        self.last_events, self.error_events = envelope.last_events, envelope.error_events

    def choice(self, index: int, prompt: Prompt) -> ChatChoice:
        fields: dict[str, object] = {}
        if index == 0 and self._body.return_token_ids:
            fields["prompt_token_ids"] = list(prompt.token_ids)
        if index == 0 and self._body.return_prompt_text:
            fields["prompt_text"] = prompt.text
        return ChatChoice(self._form, index, fields)

    def final(self, index: int, output: Output) -> dict[str, Any]:
        return self.choice(index, self._prompt).final(output)

    def body(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        body, prompt = self._body, self._prompt
        fields = prompt_fields(
            prompt,
            outputs[0].delta.prompt_logprobs,
            self._vocabulary,
            logprobs=body.prompt_logprobs is not None,
            token_ids=bool(body.return_token_ids),
        )
        choices = [self.final(index, output) for index, output in enumerate(outputs)]
        prompt_text = prompt.text if body.return_prompt_text else None
        return self._form.envelope.response(choices, usage, **fields, prompt_text=prompt_text)


class BatchRenderer:
    """The `Renderer` of a batch, which is not streamed."""

    follows_output = False

    def __init__(self, model: str, chats: Sequence[MakeRenderer], id: str, created: int) -> None:
        self._envelope = Envelope(id=id, object="chat.completion", created=created, model=model)
        self._chats = [cast(ChatRenderer, make(id, created)) for make in chats]
        self.wants_tokens = self._chats[0].wants_tokens
        self.last_events, self.error_events = self._envelope.last_events, self._envelope.error_events

    def choice(self, index: int, prompt: Prompt) -> ChoiceRenderer:
        return self._chats[index].choice(index, prompt)

    def body(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        finals = [chat.final(index, each) for index, (chat, each) in enumerate(zip(self._chats, outputs, strict=True))]
        return self._envelope.response(finals, usage)
