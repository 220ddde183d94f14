"""Sampling keys equal the published vectors, so that gateway and offline `LLM` derive the same."""

import pytest

from proa.contract import choice_key

VECTORS = [
    (0, 0, 0x61EB5A65679CC84A),
    (0, 1, 0x07BC35D937A78EE3),
    (1, 0, 0xC9D049E820148BD6),
    (42, 7, 0xB1BF3B11BD6B3E47),
    (-1, 0, 0x78EA130D0F3ACEB3),
    (9223372036854775808, 4294967296, 0xB401A933FB0EB8D7),
]


@pytest.mark.parametrize(("seed", "index", "key"), VECTORS)
def test_key_equals_published_vector(seed: int, index: int, key: int) -> None:
    assert choice_key(seed, index) == key


def test_seed_counts_modulo_64_bits() -> None:
    assert choice_key(-1, 3) == choice_key(2**64 - 1, 3)


def test_choices_and_seeds_never_share_a_key() -> None:
    assert len({choice_key(seed, index) for seed in range(50) for index in range(50)}) == 2500


def test_negative_choice_index_is_rejected() -> None:
    with pytest.raises(ValueError, match="choice index must not be negative, got -1"):
        choice_key(0, -1)
