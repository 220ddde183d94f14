"""From an output's tokens to what its reader sees: the detokenizer's text, cut at stop strings.

Knows nothing of requests, gRPC or HTTP; the gateway and the offline `LLM` both use it, so that both cut alike.

    vocabulary = Vocabulary(tokenizer)                       # one for each tokenizer, shared by all its streams
    stream = TextStream(vocabulary, stop=["\n\n"])           # one for each output
    delta = stream.push([314, 15])                           # delta.text may go to the reader now
    delta = stream.finish([2], stop_token=True)              # the last tokens, and all that was held back

Test vectors, with tokens written as what they add to the text (É1 and É2: the two bytes of é) and deltas as
`text/num_tokens`, the last one of `finish`:

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
    """What became certain: text that can no longer be part of a stop string, and the tokens it came from."""

    text: str
    num_tokens: int
    """Tokens, oldest first, that stay for good with this text: their logprobs may be sent along. Their sum over a
    stream is what the output counts; tokens pushed but never counted were cut off with the stop string."""
    stop_string: str | None = None
    """The stop string that ended the text. Nothing comes after it."""


class TextStream:
    """The text of one output: a `Detokenizer` and, where there are stop strings, their matcher.

    With stop strings, text is held back while it might still become one, and tokens are counted when their text is
    let go. The text ends at the stop string that is completed first, the longest of those completed at once. Raises
    `ValueError` for an empty stop string.
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
        """The first `min_tokens` tokens are not searched for stop strings. `context`: as for `Detokenizer`."""
        if not all(stop):
            raise ValueError("stop must not contain empty strings")
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens, context=context)
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._stop_starts = re.compile("|".join(re.escape(string[0]) for string in stop))
        self._exempt = min_tokens if stop else 0
        self._held = ""  # text that might still become a stop string; no stop string is in it whole
        self._ends: list[int] = []  # for each token not counted yet, where its text ends in _held
        self._counted = 0  # this much of _held is the rest of a token that was counted already
        self._stopped_by: str | None = None

    @property
    def plain(self) -> Detokenizer | None:
        """The detokenizer itself, where there are no stop strings: its `push` says all that `push` would, since every
        token counts at once. For those who push a token at a time, and many."""
        return None if self._stop else self._detokenizer

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes the next tokens and gives what became certain. After a stop string, tokens are ignored."""
        if not self._stop:
            return TextDelta(self._detokenizer.push(token_ids), len(token_ids))
        if self._stopped_by is not None:
            return TextDelta("", 0, self._stopped_by)
        if self._exempt:
            return self._push_exempt(token_ids)
        if len(token_ids) == 1 and not self._ends and not self._held:  # the common case, in half the time
            self._held = self._detokenizer.push(token_ids)
            if self._held and not self._stop_starts.search(self._held):
                text, self._held = self._held, ""
                return TextDelta(text, 1)
            self._ends.append(len(self._held))
            return self._release()
        for token_id in token_ids:
            self._held += self._detokenizer.push((token_id,))
            self._ends.append(len(self._held))
        return self._release()

    def finish(self, token_ids: Sequence[int] = (), *, stop_token: bool = False) -> TextDelta:
        """Takes the last tokens and gives everything that was held back; call it once.

        `stop_token` says that the last of them ended the output. It counts, but its text is shown only with
        `include_stop_str_in_output`.
        """
        hidden = 1 if stop_token and token_ids and not self._include_stop else 0
        delta = self.push(token_ids[: len(token_ids) - hidden])
        if delta.stop_string is not None:
            return delta
        self._held += self._detokenizer.finish()
        if self._ends:
            self._ends[-1] = len(self._held)
        last = self._release() if self._stop else TextDelta("", 0)
        if last.stop_string is None:
            last = TextDelta(last.text + self._held, last.num_tokens + len(self._ends) + hidden)
            self._held, self._ends = "", []
        return TextDelta(delta.text + last.text, delta.num_tokens + last.num_tokens, last.stop_string)

    def _push_exempt(self, token_ids: Sequence[int]) -> TextDelta:
        num_exempt = min(self._exempt, len(token_ids))
        self._exempt -= num_exempt
        text = self._detokenizer.push(token_ids[:num_exempt])
        delta = self.push(token_ids[num_exempt:]) if len(token_ids) > num_exempt else TextDelta("", 0)
        return TextDelta(text + delta.text, num_exempt + delta.num_tokens, delta.stop_string)

    def _release(self) -> TextDelta:
        if not self._stop_starts.search(self._held):
            return self._let_go(len(self._held))
        if (match := _first_stop(self._held, self._stop)) is not None:
            start, self._stopped_by = match
            return self._let_go(start + len(self._stopped_by) if self._include_stop else start)
        return self._let_go(_start_of_partial_stop(self._held, self._stop))

    def _let_go(self, length: int) -> TextDelta:
        """Lets this much of the held text go, and counts the fewest tokens whose text covers it."""
        text, self._held = self._held[:length], self._held[length:]
        num_tokens = 0
        if length > self._counted:
            num_tokens = bisect_left(self._ends, length) + 1
            self._counted = self._ends[num_tokens - 1]
        self._counted = max(0, self._counted - length)
        self._ends = [end - length for end in self._ends[num_tokens:]]
        return TextDelta(text, num_tokens, self._stopped_by)


def _first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Start and name of the stop string completed first in the text, the longest of those."""
    found = [(start + len(string), start, string) for string in stop if (start := text.find(string)) >= 0]
    return min(found)[1:] if found else None


def _start_of_partial_stop(text: str, stop: Sequence[str]) -> int:
    """Where the longest end of the text begins that is the beginning of a stop string; else the text's length."""
    first = len(text)
    for string in stop:
        start = text.find(string[0], max(0, len(text) - len(string) + 1), first)
        while start >= 0:
            if string.startswith(text[start:]):
                first = start
                break
            start = text.find(string[0], start + 1, first)
    return first
