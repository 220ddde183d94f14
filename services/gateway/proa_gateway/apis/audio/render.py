"""How transcriptions look: JSON, text, subtitles, and OpenAI's events."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proa.contract import TokenLogprobs
from proa.text import Vocabulary
from proa_gateway.apis.audio.languages import LANGUAGES
from proa_gateway.apis.audio.windows import Segment
from proa_gateway.apis.audio.words import Word
from proa_gateway.errors import GatewayError
from proa_gateway.http.streaming import Content
from proa_gateway.serving.logprobs import finite, token_names

_TEXT: Final = b"text/plain; charset=utf-8"
_DONE: Final = b"data: [DONE]\n\n"


class JoinedText:
    """The text of a whole audio, from that of its windows in order."""

    def __init__(self) -> None:
        self.separator = " "  # between the texts of windows
        self._parts: list[str] = []
        self._spaces = ""  # at the end of a window's text so far, maybe before more of it
        self._is_new = True  # nothing of the window's text has come

    def __str__(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> str:
        """Add more of a window's text. Return what the whole text has more now."""
        if self._is_new:
            text = text.lstrip()
            if not text:
                return ""
            self._is_new, self._spaces = False, self.separator if self._parts else ""
        stripped = text.rstrip()
        if not stripped:
            self._spaces += text
            return ""
        added = self._spaces + stripped
        self._spaces = text[len(stripped) :]
        self._parts.append(added)
        return added

    def end_window(self) -> None:
        self._is_new = True


@dataclass(frozen=True, slots=True)
class TranscriptRenderer:
    """`has_logprobs`: log probabilities are in the response."""

    vocabulary: Vocabulary
    has_logprobs: bool

    def delta(self, text: str, logprobs: Iterable[TokenLogprobs]) -> bytes:
        """The event of more text; nothing if there is none."""
        fields = {"type": "transcript.text.delta", "delta": text, **self._logprobs(logprobs)}
        return _event(fields) if text or fields.get("logprobs") else b""

    def last_events(self, text: str, logprobs: Iterable[TokenLogprobs], usage: "TranscriptUsage") -> bytes:
        done = {"type": "transcript.text.done", "text": text, **self._logprobs(logprobs), "usage": usage.tokens()}
        return _event(done) + _DONE

    @staticmethod
    def error_events(error: GatewayError) -> bytes:
        return _event(error.to_dict()) + _DONE

    def json(self, text: str, logprobs: Iterable[TokenLogprobs], usage: "TranscriptUsage") -> Content:
        return Content(orjson.dumps({"text": text, **self._logprobs(logprobs), "usage": usage.duration()}))

    def _logprobs(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Those of the text's tokens, if the response has any."""
        if not self.has_logprobs:
            return {}
        name = token_names(self.vocabulary, as_token_ids=False)
        return {
            "logprobs": [
                {
                    "token": name(entry.token_id),
                    "logprob": finite(entry.logprob),
                    "bytes": list(self.vocabulary.token_bytes(entry.token_id)),
                }
                for entry in entries
                if not self.vocabulary.is_skipped(entry.token_id, True)
            ]
        }


@dataclass(slots=True)
class TranscriptUsage:
    """What an audio has taken so far."""

    seconds: float = 0.0  # of audio
    audio_tokens: int = 0  # of the model's encoder
    text_tokens: int = 0  # of prompts
    output_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        return self.audio_tokens + self.text_tokens

    def duration(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": math.ceil(self.seconds)}

    def tokens(self) -> dict[str, Any]:
        return {
            "type": "tokens",
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "total_tokens": self.input_tokens + self.output_tokens,
            "input_token_details": {"audio_tokens": self.audio_tokens, "text_tokens": self.text_tokens},
        }


def verbose_json(
    text: str,
    usage: TranscriptUsage,
    *,
    task: str,
    language: str,
    segments: Sequence[Segment] | None,
    words: Sequence[Word] | None,
) -> Content:
    """`language`: its code. `segments` or `words` None: they were not asked for."""
    parts = dict[str, list[dict[str, Any]]]()
    if segments is not None:
        parts["segments"] = [_segment(index, each) for index, each in enumerate(segments)]
    if words is not None:
        parts["words"] = [
            {"word": each.text, "start": round(each.start, 3), "end": round(each.end, 3)} for each in words
        ]
    fields = {
        "task": task,
        "language": LANGUAGES.get(language, language),
        "duration": usage.seconds,
        "text": text,
        **parts,
        "usage": usage.duration(),
    }
    return Content(orjson.dumps(fields))


def srt(segments: Sequence[Segment]) -> Content:
    """SubRip's subtitles."""
    blocks = [
        f"{index}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_line(each)}\n"
        for index, each in enumerate(segments, start=1)
    ]
    return Content("\n".join(blocks).encode(), _TEXT)


def vtt(segments: Sequence[Segment]) -> Content:
    """WebVTT's subtitles, https://www.w3.org/TR/webvtt1/."""
    blocks = [f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_line(each)}\n" for each in segments]
    return Content("\n".join(["WEBVTT\n", *blocks]).encode(), _TEXT)


def _segment(index: int, segment: Segment) -> dict[str, Any]:
    scores = segment.scores
    return {
        "id": index,
        "seek": round(100 * segment.window_start),
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": scores.temperature,
        "avg_logprob": finite(scores.avg_logprob),
        "compression_ratio": scores.compression_ratio,
        "no_speech_prob": scores.no_speech_prob,
    }


def _time(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _line(segment: Segment) -> str:
    """Its text in one line, without the arrow that would begin another block."""
    return " ".join(segment.text.split()).replace("-->", "->")


def plain_text(text: str) -> Content:
    """As OpenAI's, with a line break at the end."""
    return Content(f"{text}\n".encode(), _TEXT)


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"
