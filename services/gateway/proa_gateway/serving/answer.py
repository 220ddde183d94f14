"""Answer: how the response of an API looks. The `Responder`, which is the same for all APIs, uses these interfaces.

Another API of chats brings three classes:

- a `ConversationHandler`, which makes a `GenerationRequest` and a `Conversation` from the body;
- an `Answer`, whose choices are `MessageStream` and `MessageCollector` (`message_sinks.py`);
- a `MessageChoice`, which renders a message's events in the API's form.

The answer and the choice of a request may share state, such as a number for each event.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proa.contract import TokenLogprobs
from proa_gateway.errors import GatewayError
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.output.deltas import DeltaSink
from proa_gateway.serving.envelope import Prompt, Usage


@dataclass(frozen=True, slots=True)
class EventOutlet:
    """Where a choice writes its events, and when.

    `interval`: deltas in an event, except the first and the last one. `on_pending` is called when a delta waits for
    `flush` because the writer is blocked. `usage`: returns the usage to put into every event.
    """

    writer: ResponseWriter
    interval: int
    on_pending: Callable[[], None]
    usage: Callable[[], Usage] | None = None


class ChoiceOutput(Protocol):
    """Takes the output of one choice."""

    @property
    def sink(self) -> DeltaSink: ...

    @property
    def markers(self) -> frozenset[int] | None:
        """Tokens that the sink gets as ids. None: the output is not parsed."""
        ...

    @property
    def num_reasoning_tokens(self) -> int | None:
        """So far. None: reasoning is not distinguished from the rest."""
        ...


class StreamedChoice(ChoiceOutput, Protocol):
    """Writes the output as events."""

    def opening(self, usage: Usage) -> bytes:
        """The events before the first delta, or nothing. `usage`: of the prompts."""
        ...

    def flush(self) -> None:
        """Write what is pending, unless the writer is blocked."""


class CollectedChoice(ChoiceOutput, Protocol):
    """Keeps the output until it has ended."""

    def final(self) -> dict[str, Any]:
        """The choice's part of the body."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]: ...


class Answer(Protocol):
    """What the client gets for one request."""

    @property
    def wants_tokens(self) -> bool:
        """Whether the response has token ids or log probabilities."""
        ...

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> StreamedChoice:
        """Choice `index`, counted over all prompts."""
        ...

    def collect(self, index: int, prompt: Prompt) -> CollectedChoice: ...

    def last_events(self, usage: Usage) -> bytes:
        """The end of a stream, after the last events of all choices."""
        ...

    def error_events(self, error: GatewayError) -> bytes:
        """The end of a stream that failed. Errors before its first event are the route's."""
        ...

    def body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        """The response that is not streamed."""
        ...
