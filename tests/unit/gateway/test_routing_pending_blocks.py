"""PendingBlocks, also against a naive model under random histories."""

import os
import random
import tracemalloc
from itertools import takewhile

import pytest

from proa_gateway.routing.pending_blocks import PendingBlocks

PROMPT = [b"%d" % number for number in range(10)]


def pending_lengths(pending: PendingBlocks, block_hashes: list[bytes], bits: range) -> dict[int, int]:
    """The lengths that `match` returns, by replica bit."""
    matched = dict.fromkeys([1 << number for number in bits], 0)
    for length, replicas in pending.match(block_hashes):
        matched |= {bit: length for bit in matched if replicas & bit}
    return matched


def make_prompt(rng: random.Random) -> list[bytes]:
    """Block names that contain the blocks before them, as a chained hash does. Many prompts share a prefix."""
    text = "".join([rng.choice("aaab") for _ in range(rng.randrange(1, 14))])
    return [text[: end + 1].encode() for end in range(len(text))]


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@pytest.mark.parametrize("seed", range(40))
def test_it_agrees_with_a_naive_model(seed: int) -> None:
    rng, bits = random.Random(seed), range(5)
    pending = PendingBlocks()
    naive: dict[int, dict[bytes, tuple[list[bytes], float]]] = {1 << number: {} for number in bits}
    for now in range(300):
        bit = 1 << rng.choice(bits)
        requests, prompt = naive[bit], make_prompt(rng)
        match rng.randrange(6):
            case 0 | 1 | 2:
                pending.add(bit, prompt, now)
                requests.pop(prompt[-1], None)
                requests[prompt[-1]] = (prompt, now)
            case 3:
                pending.confirm(bit, prompt)
                for block in prompt:
                    requests.pop(block, None)
            case 4 if requests:
                pending.remove_oldest(bit)
                del requests[next(iter(requests))]
            case 5 if rng.random() < 0.1:
                pending.remove_replica(bit)
                requests.clear()
        pending.check_integrity()
        assert pending.oldest(bit) == next((when for _, when in requests.values()), None)
        assert pending.num_pending(bit) == len({block for blocks, _ in requests.values() for block in blocks})
        prompt_to_match = make_prompt(rng)
        assert pending_lengths(pending, prompt_to_match, bits) == {
            one: max([num_shared(prompt_to_match, blocks) for blocks, _ in sent.values()], default=0)
            for one, sent in naive.items()
        }


def test_nothing_is_left_after_all_requests_are_confirmed_or_removed() -> None:
    pending = PendingBlocks()
    for number, end in enumerate((10, 4, 7)):
        pending.add(1 << number, PROMPT[:end], 0.0)
    pending.confirm(1, PROMPT)
    pending.confirm(2, PROMPT)
    pending.remove_replica(4)
    assert pending.num_blocks == pending.num_bytes == 0
    assert pending.match(PROMPT) == []
    pending.check_integrity()


def test_a_request_is_pending_until_its_last_block_is_confirmed() -> None:
    pending = PendingBlocks()
    pending.add(1, PROMPT, 0.0)
    pending.confirm(1, PROMPT[:9])
    assert pending.match(PROMPT) == [(10, 1)]
    pending.confirm(2, PROMPT)
    assert pending.match(PROMPT) == [(10, 1)], "the other replica confirmed it"
    pending.confirm(1, PROMPT[9:])
    assert pending.match(PROMPT) == []


def test_prompts_with_a_common_prefix_share_its_blocks() -> None:
    pending = PendingBlocks()
    for number in range(100):
        pending.add(1 << number % 8, [*PROMPT, b"question %d" % number], 0.0)
    assert pending.num_blocks == len(PROMPT) + 100


@pytest.mark.parametrize(("num_prompts", "num_blocks"), [(500, 1), (50, 100)])
def test_num_bytes_covers_the_memory_in_use(num_prompts: int, num_blocks: int) -> None:
    pending = PendingBlocks()
    tracemalloc.start()
    try:
        for number in range(num_prompts):
            pending.add(1 << number % 64, [os.urandom(16) for _ in range(num_blocks)], float(number))
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert measured < pending.num_bytes < 2 * measured
