"""The words of a window's text, and when each is said: dynamic time warping of how much its tokens read of the audio.

As in OpenAI's Whisper (`whisper/timing.py`), from which the rules for spaces and punctuation are too.
"""
# ruff: noqa: RUF001 - fullwidth punctuation

import string
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_WITH_NEXT: Final = "\"'“¡¿([{-"  # punctuation that belongs to the word behind it
_WITH_LAST: Final = "\"'.。,，!！?？:：”)]}、"  # to the word before it


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    start: float  # seconds, as is `end`
    end: float


def timed_words(
    pieces: Sequence[bytes], read: NDArray[np.floating], seconds: float, start: float, *, has_spaces: bool
) -> list[Word]:
    """`pieces`: the bytes of each token of a text. `read`: how much of each token of the audio, `seconds` apart from
    `start` on, those positions read whose next tokens are the text and its end, [tokens + 1, audio tokens]."""
    times = start + seconds * first_columns(read)
    words, first = [], 0
    for text, num_tokens in _split(pieces, has_spaces=has_spaces):
        end = first + num_tokens
        if word := text.strip():
            words.append(Word(word, float(times[first]), float(times[end])))
        first = end
    return words


def first_columns(read: NDArray[np.floating]) -> NDArray[np.int64]:
    """The first column of each row on the path from the first value to the last one, by steps to the next row, column
    or both, whose sum is the highest (Sakoe and Chiba, 1978).

    All values of a diagonal are computed at once. Of equal costs that of the column before is taken.
    """
    num_rows, num_columns = read.shape
    num_diagonals = num_rows + num_columns - 1
    padded = np.full((num_rows, num_diagonals + 1), np.inf, np.float32)
    padded[:, :num_columns] = -read
    # Each row is one place to the right of the row before, so that columns are diagonals.
    diagonals = padded.reshape(-1)[: num_rows * num_diagonals].reshape(num_rows, num_diagonals).T.copy()
    row_steps, both_steps = np.zeros((2, num_diagonals, num_rows), np.bool_)
    # Costs by row, the first one being that of no row, of the diagonals two before and one before.
    earlier, last = np.full((2, num_rows + 1), np.inf, np.float32)
    earlier[0] = 0
    for number, costs in enumerate(diagonals):
        both, row, column = earlier[:-1], last[:-1], last[1:]
        both_steps[number] = by_both = (both < row) & (both < column)
        row_steps[number] = by_row = (row < both) & (row < column)
        earlier, last = last, np.full(num_rows + 1, np.inf, np.float32)
        last[1:] = costs + np.where(by_both, both, np.where(by_row, row, column))
    first = np.zeros(num_rows, np.int64)
    at_row, at_column = num_rows - 1, num_columns - 1
    while at_row >= 0:
        first[at_row] = at_column
        by_both, by_row = both_steps[at_row + at_column, at_row], row_steps[at_row + at_column, at_row]
        at_column -= not by_row
        at_row -= by_both or by_row
    return first


def _split(pieces: Sequence[bytes], *, has_spaces: bool) -> list[tuple[str, int]]:
    """Words with the spaces before them, and how many tokens each has."""
    words: list[tuple[str, int]] = []
    for text, num_tokens in _characters(pieces):
        begins = not has_spaces or text.startswith(" ") or text.strip() in string.punctuation
        if begins or not words:
            words.append((text, num_tokens))
        else:
            words[-1] = _joined(words[-1], (text, num_tokens))
    backward: list[tuple[str, int]] = []
    for word in reversed(words):
        if backward and word[0].startswith(" ") and word[0].strip() in _WITH_NEXT:
            backward[-1] = _joined(word, backward[-1])
        else:
            backward.append(word)
    merged: list[tuple[str, int]] = []
    for word in reversed(backward):
        if merged and not merged[-1][0].endswith(" ") and word[0] in _WITH_LAST:
            merged[-1] = _joined(merged[-1], word)
        else:
            merged.append(word)
    return merged


def _joined(first: tuple[str, int], second: tuple[str, int]) -> tuple[str, int]:
    return first[0] + second[0], first[1] + second[1]


def _characters(pieces: Sequence[bytes]) -> Iterator[tuple[str, int]]:
    """Yield the text of as few tokens as have whole characters, and their number."""
    decoder = getincrementaldecoder("utf-8")("replace")
    text, num_tokens = "", 0
    for piece in pieces:
        text, num_tokens = text + decoder.decode(piece), num_tokens + 1
        if not decoder.getstate()[0]:
            yield text, num_tokens
            text, num_tokens = "", 0
    if num_tokens:
        yield text + decoder.decode(b"", final=True), num_tokens
