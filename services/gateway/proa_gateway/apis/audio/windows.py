"""WindowText: the text of one window as it comes, and its segments between timestamps when it has ended."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from proa.contract import TokenLogprobs
from proa_gateway.apis.audio.words import Word
from proa_gateway.output.text import Delta, FinishName

MAX_COMPRESSION: Final = 2.4  # of text, as in OpenAI's Whisper
MIN_REST: Final = 0.1  # seconds at the end of a window that may have a word


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


@dataclass(frozen=True, slots=True)
class Attempt:
    """A whole output for a window. `parts`: texts and the tokens of timestamps, in order."""

    parts: list[str | int]
    logprobs: list[TokenLogprobs]
    token_ids: Sequence[int]
    scores: Scores
    repeats: bool  # the same text many times


class WindowText:
    """The `DeltaSink` of a window's output. `on_change` is called when there is more of it.

    `start`, `duration`: of the window, in seconds. `has_ended`: no other attempt is made. `preamble`: what the output
    has before its text.
    """

    is_satisfied = False
    reasoning_tokens = None

    def __init__(
        self, start: float, duration: float, on_change: Callable[[], None], text_begin: int | None = None
    ) -> None:
        """`text_begin`: the token behind which the text begins; an output without it is all text. None: it begins with
        the output."""
        self._text_begin = text_begin
        self._is_text = text_begin is None
        self._on_change = on_change
        self._parts: list[str | int] = []  # texts and the tokens of timestamps, in order
        self._num_taken = 0  # of the parts
        self._logprobs: list[TokenLogprobs] = []
        self._num_taken_logprobs = 0
        self.preamble = ""
        self.start = start
        self.duration = duration
        self.finish_reason: FinishName | None = None
        self.scores = Scores(0.0, 0.0, 0.0, 0.0)  # once it has ended
        self.token_ids: Sequence[int] = ()  # once it has ended
        self.words: Sequence[Word] = ()  # once it has ended, if they are asked for
        self.has_ended = False

    def text(self, text: str) -> None:
        self._parts.append(text)
        self._on_change()

    def delta(self, delta: Delta) -> None:
        self._logprobs += [entry for entry in delta.logprobs if entry.token_id != self._text_begin]
        self.finish_reason = delta.finish_reason
        self.text(delta.text)

    @property
    def repeats(self) -> bool:
        """Whether the output has the same text many times."""
        return self.finish_reason == "repetition" or self.scores.compression_ratio > MAX_COMPRESSION

    def marker(self, token_id: int) -> None:
        if token_id == self._text_begin and not self._is_text:
            self.preamble, self._is_text = "".join(map(str, self._parts)), True
            self._parts, self._logprobs = [], []
        else:
            self._parts.append(token_id)

    def clear(self) -> Attempt:
        """Forget the output, which is returned: the window is tried again, or has no speech. None of it was taken."""
        assert not self._num_taken
        attempt = Attempt(self._parts, self._logprobs, self.token_ids, self.scores, self.repeats)
        self._parts, self._logprobs, self.token_ids, self.finish_reason = [], [], (), None
        return attempt

    def restore(self, attempt: Attempt) -> None:
        """Have the output of an attempt again."""
        self._parts, self._logprobs, self.token_ids = attempt.parts, attempt.logprobs, attempt.token_ids
        self.scores = attempt.scores

    def end(self) -> None:
        self.has_ended = True
        self._on_change()

    def take(self) -> tuple[str, list[TokenLogprobs]]:
        """What has come since the last call, without timestamps."""
        if not self._is_text and not self.has_ended:
            return "", []
        parts, logprobs = self._parts[self._num_taken :], self._logprobs[self._num_taken_logprobs :]
        self._num_taken, self._num_taken_logprobs = len(self._parts), len(self._logprobs)
        return "".join(part for part in parts if isinstance(part, str)), logprobs

    def score(self, temperature: float, no_speech_prob: float) -> Scores:
        """The scores of an output that has ended."""
        text = "".join(part for part in self._parts if isinstance(part, str))
        logprobs = [entry.logprob for entry in self._logprobs]
        mean = sum(logprobs) / len(logprobs) if logprobs else 0.0
        return Scores(temperature, mean, compression_ratio(text), no_speech_prob)

    def unread_from(self, timestamps: Timestamps) -> float | None:
        """Seconds in the window from which on the model has not written what is said; None: it has written all. It
        then ends its output with the end of one segment and the start of another."""
        last = self.token_ids[-2:]
        if len(last) < 2 or min(last) < timestamps.begin_id:
            return None
        time = timestamps.seconds_of(last[-1])
        return time if self.duration - time >= MIN_REST else None

    def following(self, time: float) -> "WindowText":
        """The text of the part of the window from so many seconds on."""
        return WindowText(self.start + time, self.duration - time, self._on_change)

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
