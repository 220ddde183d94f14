"""Words of a text and their times, against `transformers`."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from proa_gateway.apis.audio.words import Word, first_columns, timed_words


def in_turn(pieces: Sequence[bytes]) -> NDArray[np.float64]:
    """Each token is said while one token of the audio lasts."""
    return 2 * np.eye(len(pieces) + 1) - 1


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (5, 1), (9, 4), (12, 40), (30, 30)])
def test_time_warping_equals_that_of_transformers(shape: tuple[int, int]) -> None:
    read = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    rows, columns = _dynamic_time_warping(-read.astype(np.float64))
    assert first_columns(read).tolist() == columns[np.diff(rows, prepend=-1) > 0].tolist()


class Pieces:
    """A tokenizer of `transformers` whose token ids are places in a list of bytes."""

    eos_token_id = 1000

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: list[int], decode_with_timestamps: bool) -> str:
        return b"".join(self.pieces[each] for each in token_ids).decode(errors="replace")


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_words_are_those_of_transformers(language: str) -> None:
    rng = random.Random(5)
    texts = [" It", "'s", " 5", "0", "%", ",", " she", " said", ":", " (", '"', "no", ")", "!", " -", "...", " "]
    parts = [*([text.encode()] for text in texts), [b"\xe5\xa5", b"\xbd"]]
    for _ in range(50):
        pieces = [piece for part in rng.choices(parts, k=20) for piece in part]
        expected, tokens, _ = _combine_tokens_into_words(Pieces(pieces), list(range(len(pieces))), language)
        found = timed_words(pieces, in_turn(pieces), 0.5, 1.0, has_spaces=language == "english")
        words = [
            Word(word.strip(), 1 + each[0] / 2, 1 + (each[-1] + 1) / 2)
            for word, each in zip(expected, tokens, strict=True)
        ]
        assert found == [word for word in words if word.text]


def test_tokens_with_parts_of_a_character_are_one_word() -> None:
    pieces = [b"\xe4\xbd", b"\xa0", b"a", b"\xe4"]
    found = timed_words(pieces, in_turn(pieces), 1.0, 0.0, has_spaces=False)
    assert found == [Word("你", 0, 2), Word("a", 2, 3), Word("\ufffd", 3, 4)]
