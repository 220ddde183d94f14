"""PendingBlocks, against a naive model of it under random histories."""

import os
import random
import tracemalloc
from itertools import takewhile

import pytest

from proa_gateway.routing.pending_blocks import PendingBlocks

PROMPT = [b"%d" % number for number in range(10)]


def held(expected: PendingBlocks, block_hashes: list[bytes], bits: range) -> dict[int, int]:
    """What `match` says, by bit."""
    matched = dict.fromkeys([1 << number for number in bits], 0)
    for length, holders in expected.match(block_hashes):
        matched |= {bit: length for bit in matched if holders & bit}
    return matched


def make_prompt(rng: random.Random) -> list[bytes]:
    """Blocks that are named by all before them, as a hash is; many prompts begin alike."""
    text = "".join([rng.choice("aaab") for _ in range(rng.randrange(1, 14))])
    return [text[: end + 1].encode() for end in range(len(text))]


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@pytest.mark.parametrize("seed", range(40))
def test_it_says_what_a_naive_one_says(seed: int) -> None:
    rng, bits = random.Random(seed), range(5)
    expected = PendingBlocks()
    naive: dict[int, dict[bytes, tuple[list[bytes], float]]] = {1 << number: {} for number in bits}
    for now in range(300):
        bit = 1 << rng.choice(bits)
        requests, prompt = naive[bit], make_prompt(rng)
        match rng.randrange(6):
            case 0 | 1 | 2:
                expected.add(bit, prompt, now)
                requests.pop(prompt[-1], None)
                requests[prompt[-1]] = (prompt, now)
            case 3:
                expected.told(bit, prompt)
                for block in prompt:
                    requests.pop(block, None)
            case 4 if requests:
                expected.forget_oldest(bit)
                del requests[next(iter(requests))]
            case 5 if rng.random() < 0.1:
                expected.forget(bit)
                requests.clear()
        expected.check_integrity()
        assert expected.oldest(bit) == next((when for _, when in requests.values()), None)
        assert expected.num_expected(bit) == len({block for blocks, _ in requests.values() for block in blocks})
        wish = make_prompt(rng)
        assert held(expected, wish, bits) == {
            one: max([num_shared(wish, blocks) for blocks, _ in sent.values()], default=0)
            for one, sent in naive.items()
        }


def test_nothing_is_left_of_what_was_told_or_forgotten() -> None:
    expected = PendingBlocks()
    for number, end in enumerate((10, 4, 7)):
        expected.add(1 << number, PROMPT[:end], 0.0)
    expected.told(1, PROMPT)
    expected.told(2, PROMPT)
    expected.forget(4)
    assert expected.num_blocks == expected.num_bytes == 0
    assert expected.match(PROMPT) == []
    expected.check_integrity()


def test_a_request_is_expected_until_its_last_block_is_told() -> None:
    expected = PendingBlocks()
    expected.add(1, PROMPT, 0.0)
    expected.told(1, PROMPT[:9])
    assert expected.match(PROMPT) == [(10, 1)]
    expected.told(2, PROMPT)
    assert expected.match(PROMPT) == [(10, 1)], "another replica's"
    expected.told(1, PROMPT[9:])
    assert expected.match(PROMPT) == []


def test_prompts_that_begin_alike_share_memory() -> None:
    expected = PendingBlocks()
    for number in range(100):
        expected.add(1 << number % 8, [*PROMPT, b"question %d" % number], 0.0)
    assert expected.num_blocks == len(PROMPT) + 100


@pytest.mark.parametrize(("num_prompts", "num_blocks"), [(500, 1), (50, 100)])
def test_its_own_account_of_its_memory_is_not_too_small(num_prompts: int, num_blocks: int) -> None:
    expected = PendingBlocks()
    tracemalloc.start()
    try:
        for number in range(num_prompts):
            expected.add(1 << number % 64, [os.urandom(16) for _ in range(num_blocks)], float(number))
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert measured < expected.num_bytes < 2 * measured
