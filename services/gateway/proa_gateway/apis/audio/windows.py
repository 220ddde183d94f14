"""WindowText: the text of one window as it comes, and its segments between timestamps when it has ended."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from proa.contract import TokenLogprobs
from proa_gateway.output.text import Delta, FinishName


@dataclass(frozen=True, slots=True)
class Scores:
    """How likely a window's text is. `no_speech_prob`: that it has no speech; 0 if the model was not asked."""

    temperature: float
    avg_logprob: float  # of its tokens
    compression_ratio: float  # of its text: high if it repeats itself
    no_speech_prob: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the text with its times in seconds. `token_ids`: with its timestamps."""

    start: float
    end: float
    text: str
    token_ids: Sequence[int]
    window_start: float
    scores: Scores


@dataclass(frozen=True, slots=True)
class Timestamps:
    """What the tokens of timestamps mean: those from `begin_id` on, `seconds` apart."""

    begin_id: int
    seconds: float

    def seconds_of(self, token_id: int) -> float:
        return (token_id - self.begin_id) * self.seconds


class WindowText:
    """The `DeltaSink` of a window's output. `on_change` is called when there is more of it.

    `start`, `duration`: of the window, in seconds. `has_ended`: no other attempt is made.
    """

    is_satisfied = False
    reasoning_tokens = None

    def __init__(self, start: float, duration: float, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._parts: list[str | int] = []  # texts and the tokens of timestamps, in order
        self._num_taken = 0  # of the parts
        self._logprobs: list[TokenLogprobs] = []
        self._num_taken_logprobs = 0
        self.start = start
        self.duration = duration
        self.finish_reason: FinishName | None = None
        self.scores = Scores(0.0, 0.0, 0.0, 0.0)  # once it has ended
        self.token_ids: Sequence[int] = ()  # once it has ended
        self.has_ended = False

    def text(self, text: str) -> None:
        self._parts.append(text)
        self._on_change()

    def delta(self, delta: Delta) -> None:
        self._logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.text(delta.text)

    def marker(self, token_id: int) -> None:
        self._parts.append(token_id)

    def clear(self) -> None:
        """Forget the output: the window is tried again, or has no speech. None of it was taken."""
        assert not self._num_taken
        self._parts, self._logprobs, self.token_ids, self.finish_reason = [], [], (), None

    def end(self) -> None:
        self.has_ended = True
        self._on_change()

    def take(self) -> tuple[str, list[TokenLogprobs]]:
        """What has come since the last call, without timestamps."""
        parts, logprobs = self._parts[self._num_taken :], self._logprobs[self._num_taken_logprobs :]
        self._num_taken, self._num_taken_logprobs = len(self._parts), len(self._logprobs)
        return "".join(part for part in parts if isinstance(part, str)), logprobs

    def score(self, temperature: float, no_speech_prob: float) -> Scores:
        """The scores of an output that has ended."""
        text = "".join(part for part in self._parts if isinstance(part, str))
        logprobs = [entry.logprob for entry in self._logprobs]
        mean = sum(logprobs) / len(logprobs) if logprobs else 0.0
        return Scores(temperature, mean, compression_ratio(text), no_speech_prob)

    def segments(self, timestamps: Timestamps) -> Iterator[Segment]:
        """Yield the segments of an output that has ended. One without an end lasts to the end of the window."""
        tokens = _between_timestamps(self.token_ids, timestamps.begin_id)
        start, texts, ids = 0.0, list[str](), list[int]()
        for part in [*self._parts, None]:
            if isinstance(part, str):
                texts.append(part)
                continue
            time = self.duration if part is None else min(timestamps.seconds_of(part), self.duration)
            ids += next(tokens, ())
            text = "".join(texts)
            if text.strip():
                ids += [] if part is None else [part]
                yield Segment(self.start + start, self.start + time, text, ids, self.start, self.scores)
            start, texts, ids = time, [], [] if part is None else [part]


def _between_timestamps(token_ids: Sequence[int], begin_id: int) -> Iterator[list[int]]:
    """Yield the tokens before each timestamp, then those behind the last one."""
    between: list[int] = []
    for token_id in token_ids:
        if token_id >= begin_id:
            yield between
            between = []
        else:
            between.append(token_id)
    yield between


def compression_ratio(text: str) -> float:
    """How many times smaller zlib makes the text, as OpenAI's Whisper measures repetition."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
