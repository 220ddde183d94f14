"""Choices: the output of each sequence, written as events or kept until its end.

    OutputProcessor -> MessageConsumer -> ChoiceStream    -> ChoiceRenderer.event -> ResponseWriter
    OutputProcessor -> MessageConsumer -> ChoiceCollector -> Renderer.body

A `MessageConsumer` parses reasoning and tool calls. An output that is not parsed has no consumer: its text is content.
The text of one plain token, the most frequent event by far, has a shorter way to the client (`ChoiceStream.text`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from proa.contract import Audio, Image, PromptEmbeds
from proa_gateway.errors import GatewayError
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import ContentDelta, MessageEvent, merged
from proa_gateway.parsing.parser import MessageConsumer
from proa_gateway.serving.message_format import MessageFormat


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request, of all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompts' tokens
    reasoning_tokens: int | None = None  # of the completions' tokens; None: not distinguished from the rest
    image_tokens: int = 0  # of the prompts' tokens, like `audio_tokens`
    audio_tokens: int = 0
    metrics: dict[str, float | None] | None = None  # times that the response is to have beside them

    def to_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        for kind, count in (("image", self.image_tokens), ("audio", self.audio_tokens)):
            if count:  # OpenAI's name, and vLLM's
                usage["prompt_tokens_details"] |= {f"{kind}_tokens": count, "multimodal_tokens": {kind: count}}
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt."""

    token_ids: Sequence[int]  # 0 in the places of embeddings
    text: str | None = None  # None: the response does not need it
    images: tuple[Image, ...] = ()  # with their pixels
    message_format: MessageFormat | None = None  # how the outputs are parsed; None: all text is content
    embeds: tuple[PromptEmbeds, ...] = ()  # `hashed`, in the place of tokens
    audios: tuple[Audio, ...] = ()  # with their samples

    @property
    def text_token_ids(self) -> Sequence[int]:
        """The tokens that an output's text continues: none if some of them are embeddings."""
        return () if self.embeds else self.token_ids


@dataclass(frozen=True, slots=True)
class Output:
    """The whole output of one choice."""

    prompt: Prompt
    events: Sequence[MessageEvent]  # its text
    delta: Delta  # its tokens, log probabilities and end


class ChoiceRenderer(Protocol):
    """Renders one choice in an API's form. Stateful: `opening` comes first, and events come in order."""

    @property
    def text_frame(self) -> tuple[bytes, bytes] | None:
        """The event of a text and nothing else: the first bytes, the text as a JSON string, the last bytes. None:
        `event` renders the next event, whatever it has. May change with each event."""
        ...

    def opening(self, usage: Usage) -> bytes:
        """The events before the first output, or nothing. `usage`: of the prompts."""
        ...

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        """The API's events for these, possibly none. Neighbouring parts of one text are merged already. The last call
        has `delta.finish_reason`. `usage`: to put into the event."""
        ...


class Renderer(Protocol):
    """Renders the response to one request in an API's form."""

    @property
    def wants_tokens(self) -> bool:
        """Whether the response has token ids or log probabilities."""
        ...

    @property
    def follows_output(self) -> bool:
        """Whether the choices' `event` is called for a response that is not streamed too. Then `body` gets no outputs,
        and the events' bytes are dropped."""
        ...

    def choice(self, index: int, prompt: Prompt) -> ChoiceRenderer:
        """Choice `index`, counted over all prompts."""
        ...

    def last_events(self, usage: Usage) -> bytes:
        """The end of a stream, after the last events of all choices."""
        ...

    def error_events(self, error: GatewayError) -> bytes:
        """The end of a stream that failed. Errors before its first event are the route's."""
        ...

    def body(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """The response that is not streamed."""
        ...


class _Pending:
    """Merges output until it is taken. Texts are joined once, at the end: repeated concatenation takes quadratic
    time."""

    __slots__ = ("_delta", "_events", "_texts")

    def __init__(self) -> None:
        self._events: list[MessageEvent] = []  # without `_texts`
        self._texts: list[str] = []  # content after these events
        self._delta = Delta()  # all deltas in one, without their texts

    def text(self, text: str) -> None:
        self._texts.append(text)

    def add(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        self._join_texts()
        self._events += events
        self._delta.merge(delta)

    def take(self) -> tuple[list[MessageEvent], Delta]:
        self._join_texts()
        return merged(self._events) if len(self._events) > 1 else self._events, self._delta

    def _join_texts(self) -> None:
        if self._texts:
            self._events.append(ContentDelta("".join(self._texts)))
            self._texts.clear()


class Choice(ABC):
    """Takes the output of one choice: a `DeltaSink` of plain outputs, a `MessageSink` of parsed ones."""

    __slots__ = ("consumer",)
    is_satisfied = False
    reasoning_tokens = None

    def __init__(self, message_format: MessageFormat | None) -> None:
        """`message_format` None: the output is not parsed."""
        self.consumer: MessageConsumer | None = None
        """Parses the output. None: it is not parsed."""
        if message_format is not None:
            parallel_calls = message_format.parallel_calls
            self.consumer = MessageConsumer(message_format.parser(), self, parallel_calls=parallel_calls)

    @abstractmethod
    def text(self, text: str) -> None: ...

    def delta(self, delta: Delta) -> None:
        self.events([ContentDelta(delta.text)] if delta.text else [], delta)

    def marker(self, token_id: int) -> None:
        raise AssertionError("only parsed outputs have markers")

    @abstractmethod
    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None: ...


class ChoiceCollector(Choice):
    """Keeps the output until it has ended."""

    __slots__ = ("_follower", "_pending", "_prompt")

    def __init__(self, prompt: Prompt, follower: ChoiceRenderer | None = None) -> None:
        """`follower`: gets the output as it comes, in place of `output`."""
        super().__init__(prompt.message_format)
        self._prompt = prompt
        self._follower = follower
        self._pending = _Pending()  # stays empty if there is a follower

    def text(self, text: str) -> None:
        if self._follower is None:
            self._pending.text(text)
        else:
            self.events([ContentDelta(text)], Delta())

    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        if self._follower is None:
            self._pending.add(events, delta)
        else:
            self._follower.event(events, delta, None)

    def output(self) -> Output:
        return Output(self._prompt, *self._pending.take())


class ChoiceStream(Choice):
    """Writes the output as events. While the client reads too slowly, output is merged into one event."""

    __slots__ = (
        "_head",
        "_interval",
        "_is_plain",
        "_num_pending",
        "_on_blocked",
        "_pending",
        "_tail",
        "_usage",
        "_writer",
        "renderer",
    )

    def __init__(
        self,
        message_format: MessageFormat | None,
        renderer: ChoiceRenderer,
        writer: ResponseWriter,
        *,
        interval: int = 1,
        on_blocked: Callable[[], None],
        usage: Callable[[], Usage] | None = None,
    ) -> None:
        """`interval`: deltas in an event, except the first and the last one. `on_blocked` is called when output waits
        for `flush` because the writer is blocked. `usage`: returns the usage to put into every event."""
        super().__init__(message_format)
        self.renderer = renderer
        self._writer = writer
        self._interval = interval
        self._on_blocked = on_blocked
        self._usage = usage
        # Texts may be written within the renderer's `text_frame`.
        self._is_plain = message_format is None and interval == 1 and usage is None
        self._pending: _Pending | None = None  # None: all output has been written
        self._num_pending = interval  # so that the first delta is written at once
        self._head = self._tail = b""  # around a text that is written at once; empty: texts go to `_pending`

    def text(self, text: str) -> None:
        if self._head and not self._writer.blocked:
            self._writer.write(self._head + orjson.dumps(text) + self._tail)
        else:
            self._hold().text(text)
            self._flush_or_wait(is_last=False)

    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        if self._interval == 1 and self._pending is None and not self._writer.blocked:
            self._write(events, delta)
        else:
            self._hold().add(events, delta)
            self._flush_or_wait(is_last=delta.finish_reason is not None)

    def flush(self) -> None:
        """Write what is pending, unless the writer is blocked."""
        if self._pending is not None and not self._writer.blocked:
            (events, delta), self._pending = self._pending.take(), None
            self._num_pending = 0
            self._write(events, delta)

    def _hold(self) -> _Pending:
        if self._pending is None:
            self._pending, self._head = _Pending(), b""
        return self._pending

    def _flush_or_wait(self, *, is_last: bool) -> None:
        self._num_pending += 1
        if self._writer.blocked:
            self._on_blocked()
        elif is_last or self._num_pending >= self._interval:
            self.flush()

    def _write(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        if data := self.renderer.event(events, delta, self._usage() if self._usage else None):
            self._writer.write(data)
        if self._is_plain and (frame := self.renderer.text_frame) is not None:
            self._head, self._tail = frame
