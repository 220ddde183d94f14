"""PrefixIndex, also against a naive model of it under random histories."""

import os
import random
import tracemalloc
from collections.abc import Sequence

import pytest

from proa_gateway.routing.index import EXPECTED_SECONDS, PrefixIndex
from proa_gateway.types import BlockChain

CHAIN = BlockChain(b"root", 16)
OTHER = BlockChain(b"other", 16)
PROMPT = [b"%d" % number for number in range(10)]


def make_index(*addresses: str, capacity: int = 100, max_blocks: int = 1000) -> PrefixIndex:
    index = PrefixIndex(max_blocks)
    for address in addresses:
        index.add(address, CHAIN, capacity)
    return index


def held(index: PrefixIndex, block_hashes: Sequence[bytes]) -> dict[str, int]:
    """What `match` says, by address. The longest parts come first, and no address twice."""
    matched = index.match(block_hashes)
    assert matched == sorted(matched, key=lambda part: -part[0])
    addresses = [address for _, addresses in matched for address in addresses]
    assert len(addresses) == len(set(addresses))
    return {address: length for length, addresses in matched for address in addresses}


def test_each_replica_is_known_by_its_longest_prefix() -> None:
    index = make_index("a", "b", "c", "d")
    index.stored("a", PROMPT)
    index.stored("b", PROMPT[:3])
    index.stored("c", PROMPT[:7])
    assert held(index, PROMPT) == {"a": 10, "b": 3, "c": 7}
    assert held(index, PROMPT[:5]) == {"a": 5, "b": 3, "c": 5}
    assert held(index, [b"unknown", *PROMPT]) == {}
    assert held(index, []) == {}


def test_a_prefix_ends_at_its_first_missing_block() -> None:
    index = make_index("a")
    index.stored("a", PROMPT)
    index.removed("a", [PROMPT[4]])
    assert index.count("a", PROMPT) == 4
    index.removed("a", [PROMPT[0]])
    assert held(index, PROMPT) == {}
    assert index.count("a", PROMPT) == 0


def test_a_request_that_was_sent_is_expected_to_leave_its_blocks() -> None:
    index = make_index("a", "b")
    index.expect("a", CHAIN, PROMPT, now=0.0)
    assert held(index, PROMPT) == {"a": 10}
    assert index.count("b", PROMPT) == 0


def test_expected_blocks_that_the_engine_never_tells_are_forgotten() -> None:
    index = make_index("a")
    index.expect("a", CHAIN, PROMPT, now=0.0)
    index.stored("a", PROMPT[:4])
    index.expect("a", CHAIN, PROMPT[:6], now=EXPECTED_SECONDS - 1)
    index.expect("a", CHAIN, [], now=EXPECTED_SECONDS)
    assert held(index, PROMPT) == {"a": 6}, "told ones stay, and so do those that were expected again"
    index.expect("a", CHAIN, [], now=2 * EXPECTED_SECONDS)
    assert held(index, PROMPT) == {"a": 4}
    index.check_integrity()


def test_without_events_expected_blocks_count_until_the_cache_must_be_full() -> None:
    index = make_index("a", capacity=20)
    index.cannot_tell("a")
    index.expect("a", CHAIN, PROMPT, now=0.0)
    index.expect("a", CHAIN, [b"x%d" % number for number in range(10)], now=1e6)
    assert held(index, PROMPT) == {"a": 10}
    index.expect("a", CHAIN, PROMPT, now=2e6)
    index.expect("a", CHAIN, [b"y"], now=3e6)
    assert held(index, PROMPT) == {"a": 10}, "used again later than the others"
    assert held(index, [b"x0"]) == {}
    index.check_integrity()


@pytest.mark.parametrize("tells", [True, False])
def test_one_prompt_again_and_again_takes_no_more_memory(tells: bool) -> None:
    index = make_index("a", capacity=50)
    if not tells:
        index.cannot_tell("a")
    index.expect("a", CHAIN, [b"once"], now=0.0)
    for round in range(1000):
        index.expect("a", CHAIN, PROMPT, now=1 + round / 1000)
        if round == 100:
            before = index.num_bytes
    assert index.num_bytes == before
    assert held(index, PROMPT) == {"a": 10}
    index.check_integrity()


def test_a_replica_with_another_root_learns_nothing_from_a_request() -> None:
    index = make_index("a")
    index.add("b", OTHER, 100)
    index.expect("b", CHAIN, PROMPT, now=0.0)
    assert held(index, PROMPT) == {}


def test_a_snapshot_voids_what_was_told_but_not_what_is_expected() -> None:
    index = make_index("a")
    index.stored("a", PROMPT[:5])
    index.expect("a", CHAIN, [b"x", b"y"], now=0.0)
    index.void("a")
    assert held(index, PROMPT) == {}
    assert held(index, [b"x", b"y"]) == {"a": 2}


def test_a_lost_replica_leaves_nothing_to_the_next_one() -> None:
    index = make_index("a", "b")
    index.stored("a", PROMPT)
    index.stored("b", PROMPT[:2])
    index.expect("a", CHAIN, [b"x"], now=0.0)
    index.remove("a")
    index.add("c", CHAIN, 100)
    assert held(index, PROMPT) == {"b": 2}
    assert held(index, [b"x"]) == {}
    assert index.num_blocks == 2
    index.check_integrity()


def test_of_too_many_blocks_those_used_last_are_kept() -> None:
    index = make_index("a", "b", capacity=1000, max_blocks=40)
    index.stored("a", PROMPT)
    for number in range(50):
        index.stored("b", [b"%d.%d" % (number, block) for block in range(8)])
        index.expect("a", CHAIN, PROMPT, now=0.0)
        assert index.num_blocks <= 40 + len(PROMPT), "told and expected ones have their bounds"
        index.check_integrity()
    assert held(index, PROMPT) == {"a": 10}
    assert held(index, [b"49.0", b"49.1"]) == {"b": 2}
    assert held(index, [b"0.0"]) == {}


def test_its_own_account_of_its_memory_is_not_too_small() -> None:
    index = PrefixIndex()
    addresses = [f"10.0.0.{number}:50051" for number in range(64)]
    for address in addresses:
        index.add(address, CHAIN, 1000)
    tracemalloc.start()
    try:
        for address in addresses:
            index.stored(address, [os.urandom(16) for _ in range(500)])
            index.expect(address, CHAIN, [os.urandom(16) for _ in range(100)], now=0.0)
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert measured < index.num_bytes < 2 * measured


@pytest.mark.parametrize("seed", range(20))
def test_it_says_what_a_naive_index_says(seed: int) -> None:
    rng = random.Random(seed)
    chains = [[b"%d" % first, *(b"%d.%d" % (first, number) for number in range(12))] for first in range(6)]
    index = PrefixIndex()
    naive: dict[str, set[bytes]] = {}
    for _ in range(300):
        address = rng.choice("abcdefgh")
        chain = rng.choice(chains)[: rng.randrange(1, 13)]
        match rng.randrange(6):
            case 0:
                index.add(address, CHAIN, 1000)
                naive[address] = set()
            case 1 if rng.random() < 0.3:
                index.remove(address)
                naive.pop(address, None)
            case 2 if address in naive:  # as an engine does, the tail first
                gone = [*chain[rng.randrange(len(chain)) :], b"never held"]
                longer = [block for other in chains if other[0] == chain[0] for block in other[len(chain) :]]
                index.removed(address, [*gone, *longer])
                naive[address].difference_update(gone, longer)
            case 3 | 4 if address in naive:
                index.stored(address, chain)
                naive[address].update(chain)
            case 5 if address in naive:
                index.void(address)
                naive[address].clear()
        index.check_integrity()
        wish = rng.choice(chains)
        expected = {}
        for other, blocks in naive.items():
            count = next((number for number, block in enumerate(wish) if block not in blocks), len(wish))
            assert index.count(other, wish) == count
            if count:
                expected[other] = count
        assert held(index, wish) == expected
