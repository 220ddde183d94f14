"""MessagesAnswer: how the response of `/v1/messages` looks."""

from collections.abc import Sequence

import orjson

from proa_gateway.errors import GatewayError
from proa_gateway.messages.choice import MessagesChoice, event_of, usage_of
from proa_gateway.messages.errors import error_event
from proa_gateway.openai.answer import CollectedChoice, EventOutlet, StreamedChoice
from proa_gateway.openai.envelope import Prompt, Usage
from proa_gateway.openai.message_format import MessageFormat
from proa_gateway.openai.message_sinks import MessageCollector, MessageStream


class MessagesAnswer:
    """The `Answer` of a message: it has one choice."""

    wants_tokens = False

    def __init__(self, choice: MessagesChoice, message_format: MessageFormat | None, request_id: str) -> None:
        """`message_format`: None: all text is content. `request_id`: for errors."""
        self._choice = choice
        self._message_format = message_format
        self._request_id = request_id

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> StreamedChoice:
        return MessageStream(self._choice, self._message_format, outlet)

    def collect(self, index: int, prompt: Prompt) -> CollectedChoice:
        return MessageCollector(self._choice, self._message_format)

    def last_events(self, usage: Usage) -> bytes:
        return event_of("message_delta", delta=self._choice.stop, usage=usage_of(usage)) + event_of("message_stop")

    def error_events(self, error: GatewayError) -> bytes:
        return error_event(error, self._request_id)

    def body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        return orjson.dumps({**choices[0].final(), "usage": usage_of(usage)})
