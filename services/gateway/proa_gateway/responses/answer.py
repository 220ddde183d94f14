"""ResponsesAnswer: how the response of `/v1/responses` looks."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from proa.contract import TokenLogprobs
from proa_gateway.deltas import Delta
from proa_gateway.errors import GatewayError
from proa_gateway.openai.answer import CollectedChoice, EventOutlet, StreamedChoice
from proa_gateway.openai.envelope import Prompt, Usage
from proa_gateway.openai.message_format import MessageFormat
from proa_gateway.openai.message_sinks import MessageOutput, MessageStream
from proa_gateway.parsing.events import MessageEvent
from proa_gateway.responses.choice import ResponsesChoice
from proa_gateway.responses.parts import Fields
from proa_gateway.responses.response import ended, failed

Keep = Callable[[Fields], None]
"""Stores a response."""


class ResponsesAnswer:
    """The `Answer` of a response: it has one choice."""

    def __init__(
        self, choice: ResponsesChoice, message_format: MessageFormat | None, keep: Keep, *, wants_tokens: bool
    ) -> None:
        """`message_format`: None: all text is content. `keep` gets the response when it has ended."""
        self._choice = choice
        self._message_format = message_format
        self._keep = keep
        self.wants_tokens = wants_tokens

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> StreamedChoice:
        return MessageStream(self._choice, self._message_format, outlet)

    def collect(self, index: int, prompt: Prompt) -> CollectedChoice:
        return _Collector(self._choice, self._message_format)

    def last_events(self, usage: Usage) -> bytes:
        response = self._ended(usage)
        return self._choice.render((f"response.{response['status']}", {"response": response}))

    def error_events(self, error: GatewayError) -> bytes:
        choice = self._choice
        last = choice.items.close("incomplete")
        response = failed(choice.response, error, choice.items.items)
        self._keep(response)
        return choice.render(*last, ("response.failed", {"response": response}))

    def body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        return orjson.dumps(self._ended(usage))

    def _ended(self, usage: Usage) -> Fields:
        choice = self._choice
        response = ended(choice.response, choice.items.items, usage, complete=choice.finish_reason != "length")
        self._keep(response)
        return response


class _Collector(MessageOutput):
    """The `CollectedChoice` of a response. The same items as in a stream are built; their events are dropped."""

    def __init__(self, choice: ResponsesChoice, message_format: MessageFormat | None) -> None:
        super().__init__(self, message_format)
        self._choice = choice
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()

    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        self._choice.add(events, delta)

    def final(self) -> dict[str, Any]:
        return self._choice.response
