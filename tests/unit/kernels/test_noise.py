"""The sampling noise: test vectors and statistical properties."""

import math

import pytest
import torch
from torch import Tensor

from proa_engine.kernels.sampling.sampling_reference import gumbel, random_words, row_words

# (key, position, token id) -> the row's two words, and the token's word.
VECTORS = [
    ((0x0000000000000000, 0, 0), (0x29DCEA06, 0x50C6C41E, 0xCC3CC0A6)),
    ((0x0000000000000000, 0, 1), (0x29DCEA06, 0x50C6C41E, 0x58408CD8)),
    ((0x0000000000000001, 0, 0), (0x87D583BC, 0x6B1BCD78, 0xF0F8C1AB)),
    ((0x0000000100000000, 0, 0), (0x12AA7B43, 0x8FF5D7DC, 0x850C6500)),
    ((0x0000000000000000, 1, 0), (0xAD00BCE4, 0xDE75618E, 0x1A242935)),
    ((0x0123456789ABCDEF, 4095, 151935), (0x83D6A61C, 0xBA477876, 0xC75C98B8)),
    ((0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (0x2D58668C, 0x8D2AE5C9, 0xE83DEC1E)),
]
WORD = 2**32 - 1


def mix(word: int) -> int:
    """The mixer's definition in Python integers."""
    word ^= word >> 16
    word = word * 0x7FEB352D & WORD
    word ^= word >> 15
    word = word * 0x846CA68B & WORD
    return word ^ word >> 16


def words_by_definition(key: int, position: int, token_id: int) -> tuple[int, int, int]:
    lo, hi = key & WORD, key >> 32
    a = mix(mix(mix(lo ^ 0x243F6A88) ^ hi) ^ position)
    b = mix((mix(mix(hi ^ 0x13198A2E) ^ lo) + position) & WORD)
    word = token_id ^ a
    word ^= word >> 16
    word = (word * 0x7FEB352D + b) & WORD
    word ^= word >> 15
    word = word * 0x846CA68B & WORD
    return a, b, word ^ word >> 16


def words(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).int()


def noise(key: int, position: int, vocab_size: int = 1000) -> Tensor:
    ids = torch.arange(vocab_size, dtype=torch.int32)
    return gumbel(words(key & WORD), words(key >> 32), words(position), ids)[0]


@pytest.mark.parametrize(("arguments", "expected"), VECTORS)
def test_words_equal_published_vectors(arguments: tuple[int, int, int], expected: tuple[int, int, int]) -> None:
    key, position, token_id = arguments
    a, b = row_words(words(key & WORD), words(key >> 32), words(position))
    word = random_words(a, b, words(token_id))
    assert (int(a) & WORD, int(b) & WORD, int(word) & WORD) == expected
    assert words_by_definition(key, position, token_id) == expected


def test_noise_does_not_depend_on_the_other_rows() -> None:
    count, vocab_size = 37, 4099
    keys = torch.arange(count, dtype=torch.int32) * 7919
    ids = torch.arange(vocab_size, dtype=torch.int32)
    together = gumbel(keys, keys + 1, keys + 2, ids)
    for row in range(count):
        one = slice(row, row + 1)
        assert torch.equal(gumbel(keys[one], keys[one] + 1, keys[one] + 2, ids)[0], together[row])


def test_noise_has_the_gumbel_distribution() -> None:
    values = torch.cat([noise(key, position) for key in range(20) for position in range(20)]).double()
    steps = torch.arange(1, values.numel() + 1) / values.numel()
    expected = torch.exp(-torch.exp(-values.sort().values))
    assert (expected - steps).abs().max() < 1.95 / math.sqrt(values.numel())  # Kolmogorov-Smirnov, p = 0.001
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("other", [(1, 0), (1 << 32, 0), (0, 1), (1 << 63, 0)])
def test_neighbouring_keys_and_positions_share_nothing(other: tuple[int, int]) -> None:
    pair = torch.stack([noise(0, 0, 100_000), noise(*other, 100_000)])
    assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(100_000)


def test_every_bit_of_a_word_is_fair_across_tokens_keys_and_positions() -> None:
    row = torch.arange(500, dtype=torch.int32)
    drawn = random_words(*row_words(row // 20, row * 0, row % 20), torch.arange(400, dtype=torch.int32))
    for bit in range(32):
        share = ((drawn >> bit) & 1).double().mean()
        assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(drawn.numel())
