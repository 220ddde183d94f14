"""Incremental detokenization with stop strings, for the gateway and the offline `LLM`.

    vocabulary = Vocabulary(tokenizer)                       # one for each tokenizer, shared by all its streams
    stream = TextStream(vocabulary, stop=["\n\n"])           # one for each output
    delta = stream.push([314, 15])                           # delta.text is final
    delta = stream.finish([2], stop_token=True)              # the last tokens, and all text that was held back

Test vectors. Tokens are written as the text they add (É1 and É2: the two bytes of é), deltas as `text/num_tokens`; the
last delta comes from `finish`.

    stop       tokens pushed one by one     deltas
    none       a b É1 É2 c                  a/1 b/1 /1 é/1 c/1 /0
    none       a É1                         a/1 /1 \ufffd/0
    bcd        a b c x                      a/1 /0 /0 bcx/3 /0
    bcd        a b c d                      a/1 /0 /0 /0, stopped by bcd
    bcd        a b c                        a/1 /0 /0 bc/2
    c, bc      a b c                        a/1 /0 /0, stopped by bc
    éb         a É1 É2 b                    a/1 /0 /0 /0, stopped by éb
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from proa.detokenizer import Detokenizer, Vocabulary

__all__ = ["Detokenizer", "TextDelta", "TextStream", "Vocabulary"]


class TextDelta(NamedTuple):
    """Text that can no longer become part of a stop string, and the number of its tokens."""

    text: str
    num_tokens: int
    """How many more of the pushed tokens, oldest first, belong to the output. Tokens that are never counted were cut
    off with the stop string."""
    stop_string: str | None = None
    """The stop string that ended the text, if one did."""


class TextStream:
    """The text of one output: a `Detokenizer` and a stop string matcher.

    Text that may be the beginning of a stop string is held back, and its tokens count when it is released. The text
    ends at the stop string that is complete first; if several are complete at once, at the longest.
    """

    __slots__ = (
        "_counted",
        "_detokenizer",
        "_ends",
        "_exempt",
        "_held",
        "_include_stop",
        "_stop",
        "_stop_starts",
        "_stopped_by",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        context: Sequence[int] = (),
    ) -> None:
        """The first `min_tokens` tokens are not searched for stop strings. `context`: as for `Detokenizer`. Raises
        `ValueError` for an empty stop string."""
        if not all(stop):
            raise ValueError("stop must not contain empty strings")
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens, context=context)
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._stop_starts = re.compile("|".join(re.escape(string[0]) for string in stop))
        self._exempt = min_tokens if stop else 0
        self._held = ""  # text that may become a stop string; never contains a whole one
        self._ends: list[int] = []  # for each token that is not counted yet, where its text ends in _held
        self._counted = 0  # length of the text at the start of _held whose token is counted already
        self._stopped_by: str | None = None

    @property
    def plain(self) -> Detokenizer | None:
        """The detokenizer, if there are no stop strings. Every token then counts at once, and calling the detokenizer's
        `push` saves making a `TextDelta` for each."""
        return None if self._stop else self._detokenizer

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add the next tokens. After a stop string, tokens are ignored."""
        if not self._stop:
            return TextDelta(self._detokenizer.push(token_ids), len(token_ids))
        if self._stopped_by is not None:
            return TextDelta("", 0, self._stopped_by)
        if self._exempt:
            return self._push_exempt(token_ids)
        if len(token_ids) == 1 and not self._ends and not self._held:  # a shortcut for the common case: half the time
            self._held = self._detokenizer.push_token(token_ids[0])
            if self._held and not self._stop_starts.search(self._held):
                text, self._held = self._held, ""
                return TextDelta(text, 1)
            self._ends.append(len(self._held))
            return self._release()
        for token_id in token_ids:
            self._held += self._detokenizer.push_token(token_id)
            self._ends.append(len(self._held))
        return self._release()

    def finish(self, token_ids: Sequence[int] = (), *, stop_token: bool = False) -> TextDelta:
        """Add the last tokens and release all text that was held back. Call it once.

        `stop_token`: the last token is a stop token. It counts, but its text is emitted only with
        `include_stop_str_in_output`.
        """
        hidden = 1 if stop_token and token_ids and not self._include_stop else 0
        delta = self.push(token_ids[: len(token_ids) - hidden])
        if delta.stop_string is not None:
            return delta
        last = self._release_all()
        if last.stop_string is not None:
            hidden = 0
        return TextDelta(delta.text + last.text, delta.num_tokens + last.num_tokens + hidden, last.stop_string)

    def boundary(self) -> TextDelta:
        """Release all text that was held back, before a token that adds no text. More tokens may follow.

        Neither a character nor a stop string extends over the boundary. The token counts towards `min_tokens`, but not
        in the delta.
        """
        if self._stopped_by is not None:
            return TextDelta("", 0, self._stopped_by)
        delta = self._release_all()
        self._exempt = max(0, self._exempt - 1)
        return delta

    def _push_exempt(self, token_ids: Sequence[int]) -> TextDelta:
        num_exempt = min(self._exempt, len(token_ids))
        self._exempt -= num_exempt
        text = self._detokenizer.push(token_ids[:num_exempt])
        delta = self.push(token_ids[num_exempt:]) if len(token_ids) > num_exempt else TextDelta("", 0)
        return TextDelta(text + delta.text, num_exempt + delta.num_tokens, delta.stop_string)

    def _release_all(self) -> TextDelta:
        """Release all held text, an incomplete character included, up to a stop string that is complete with it."""
        self._held += self._detokenizer.finish()
        if self._ends:
            self._ends[-1] = len(self._held)
        else:  # the token of an incomplete character was counted with whole ones that it begins with
            self._counted = len(self._held)
        delta = self._release() if self._stop else TextDelta("", 0)
        if delta.stop_string is None:
            delta = TextDelta(delta.text + self._held, delta.num_tokens + len(self._ends))
            self._held, self._ends, self._counted = "", [], 0
        return delta

    def _release(self) -> TextDelta:
        if not self._stop_starts.search(self._held):
            return self._release_text(len(self._held))
        if (match := _first_stop(self._held, self._stop)) is not None:
            start, self._stopped_by = match
            return self._release_text(start + len(self._stopped_by) if self._include_stop else start)
        return self._release_text(_start_of_partial_stop(self._held, self._stop))

    def _release_text(self, length: int) -> TextDelta:
        """Release `length` characters of the held text, and count the fewest tokens whose text covers them."""
        text, self._held = self._held[:length], self._held[length:]
        num_tokens = 0
        if length > self._counted:
            num_tokens = bisect_left(self._ends, length) + 1
            self._counted = self._ends[num_tokens - 1]
        self._counted = max(0, self._counted - length)
        self._ends = [end - length for end in self._ends[num_tokens:]]
        return TextDelta(text, num_tokens, self._stopped_by)


def _first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that is complete first in the text, and its start; of several, the longest."""
    found = [(start + len(string), start, string) for string in stop if (start := text.find(string)) >= 0]
    return min(found)[1:] if found else None


def _start_of_partial_stop(text: str, stop: Sequence[str]) -> int:
    """Start of the text's longest suffix that is a prefix of a stop string; without one, the text's length."""
    first = len(text)
    for string in stop:
        start = text.find(string[0], max(0, len(text) - len(string) + 1), first)
        while start >= 0:
            if string.startswith(text[start:]):
                first = start
                break
            start = text.find(string[0], start + 1, first)
    return first
