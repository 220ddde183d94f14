"""PrefixIndex, also against a naive model under random histories."""

import os
import random
import tracemalloc
from collections.abc import Sequence

import pytest

from proa_gateway.routing.index import PENDING_TIMEOUT, PrefixIndex
from proa_gateway.routing.policies import HashChain, RoutingHints

CHAIN = HashChain(b"root", 16)
OTHER = HashChain(b"other", 16)
PROMPT = [b"%d" % number for number in range(10)]


def make_index(*addresses: str, capacity: int = 100, max_blocks: int = 1000) -> PrefixIndex:
    index = PrefixIndex(max_blocks)
    for address in addresses:
        index.add_replica(address, CHAIN, capacity)
    return index


def sent(block_hashes: Sequence[bytes], num_more: int = 1) -> RoutingHints:
    """Hints for a prompt of these blocks and `num_more` tokens."""
    return RoutingHints(block_hashes, CHAIN, 16 * len(block_hashes) + num_more)


def matched_lengths(index: PrefixIndex, block_hashes: Sequence[bytes]) -> dict[str, int]:
    """The lengths that `match` returns, by address. Checks that the longest come first and no address comes twice."""
    matched = index.match(block_hashes)
    assert matched == sorted(matched, key=lambda part: -part[0])
    addresses = [address for _, addresses in matched for address in addresses]
    assert len(addresses) == len(set(addresses))
    return {address: length for length, addresses in matched for address in addresses}


def test_each_replica_is_matched_by_its_longest_prefix() -> None:
    index = make_index("a", "b", "c", "d")
    index.add_confirmed("a", PROMPT)
    index.add_confirmed("b", PROMPT[:3])
    index.add_confirmed("c", PROMPT[:7])
    assert matched_lengths(index, PROMPT) == {"a": 10, "b": 3, "c": 7}
    assert matched_lengths(index, PROMPT[:5]) == {"a": 5, "b": 3, "c": 5}
    assert matched_lengths(index, [b"unknown", *PROMPT]) == {}
    assert matched_lengths(index, []) == {}


def test_a_prefix_ends_at_its_first_missing_block() -> None:
    index = make_index("a")
    index.add_confirmed("a", PROMPT)
    index.remove_confirmed("a", [PROMPT[4]])
    assert index.count_cached("a", PROMPT) == 4
    index.remove_confirmed("a", [PROMPT[0]])
    assert matched_lengths(index, PROMPT) == {}
    assert index.count_cached("a", PROMPT) == 0


def test_a_sent_request_makes_its_blocks_pending() -> None:
    index = make_index("a", "b")
    index.add_pending("a", sent(PROMPT), now=0.0)
    assert matched_lengths(index, PROMPT) == {"a": 10}
    assert index.count_cached("b", PROMPT) == 0


def test_pending_blocks_that_are_never_confirmed_time_out() -> None:
    index = make_index("a")
    index.add_pending("a", sent(PROMPT), now=0.0)
    index.add_confirmed("a", PROMPT[:4])
    index.add_pending("a", sent(PROMPT[:6]), now=PENDING_TIMEOUT - 1)
    index.add_pending("a", sent([]), now=PENDING_TIMEOUT)
    assert matched_lengths(index, PROMPT) == {"a": 6}, "confirmed blocks stay, and so do blocks that were sent again"
    index.add_pending("a", sent([]), now=2 * PENDING_TIMEOUT)
    assert matched_lengths(index, PROMPT) == {"a": 4}
    index.check_integrity()


def test_without_events_pending_blocks_stay_until_the_cache_must_be_full() -> None:
    index = make_index("a", capacity=20)
    index.disable_events("a")
    index.add_pending("a", sent(PROMPT), now=0.0)
    index.add_pending("a", sent([b"x%d" % number for number in range(10)]), now=1e6)
    assert matched_lengths(index, PROMPT) == {"a": 10}
    index.add_pending("a", sent(PROMPT), now=2e6)
    index.add_pending("a", sent([b"y"]), now=3e6)
    assert matched_lengths(index, PROMPT) == {"a": 10}, "used again later than the others"
    assert matched_lengths(index, [b"x0"]) == {}
    index.check_integrity()


@pytest.mark.parametrize("has_events", [True, False])
def test_sending_one_prompt_repeatedly_takes_no_more_memory(has_events: bool) -> None:
    index = make_index("a", capacity=50)
    if not has_events:
        index.disable_events("a")
    index.add_pending("a", sent([b"once"]), now=0.0)
    for round in range(1000):
        index.add_pending("a", sent(PROMPT), now=1 + round / 1000)
        if round == 100:
            before = index.num_bytes
    assert index.num_bytes == before
    assert matched_lengths(index, PROMPT) == {"a": 10}
    index.check_integrity()


def test_a_request_does_not_change_a_replica_with_another_hash_chain() -> None:
    index = make_index("a")
    index.add_replica("b", OTHER, 100)
    index.add_pending("b", sent(PROMPT), now=0.0)
    assert matched_lengths(index, PROMPT) == {}


def test_a_snapshot_clears_confirmed_but_not_pending_blocks() -> None:
    index = make_index("a")
    index.add_confirmed("a", PROMPT[:5])
    index.add_pending("a", sent([b"x", b"y"]), now=0.0)
    index.clear_confirmed("a")
    assert matched_lengths(index, PROMPT) == {}
    assert matched_lengths(index, [b"x", b"y"]) == {"a": 2}


def test_a_removed_replica_leaves_no_blocks_to_the_next_one() -> None:
    index = make_index("a", "b")
    index.add_confirmed("a", PROMPT)
    index.add_confirmed("b", PROMPT[:2])
    index.add_pending("a", sent([b"x"]), now=0.0)
    index.remove_replica("a")
    index.add_replica("c", CHAIN, 100)
    assert matched_lengths(index, PROMPT) == {"b": 2}
    assert matched_lengths(index, [b"x"]) == {}
    assert index.num_blocks == 2
    index.check_integrity()


def test_the_least_recently_used_blocks_are_evicted() -> None:
    index = make_index("a", "b", capacity=1000, max_blocks=40)
    index.add_confirmed("a", PROMPT)
    for number in range(50):
        index.add_confirmed("b", [b"%d.%d" % (number, block) for block in range(8)])
        index.add_pending("a", sent(PROMPT), now=0.0)
        assert index.num_blocks <= 40 + len(PROMPT), "confirmed and pending blocks are bounded"
        index.check_integrity()
    assert matched_lengths(index, PROMPT) == {"a": 10}
    assert matched_lengths(index, [b"49.0", b"49.1"]) == {"b": 2}
    assert matched_lengths(index, [b"0.0"]) == {}


def test_a_prompt_that_others_begin_with_outlives_what_comes_after_it() -> None:
    """It is the first of every generation, and is used less often than a generation's blocks are evicted."""
    index = make_index("a", capacity=1000, max_blocks=100)
    index.add_confirmed("a", PROMPT)
    for number in range(200):
        index.add_confirmed("a", [b"%d.%d" % (number, block) for block in range(5)])
        if number % 5 == 0:
            assert matched_lengths(index, PROMPT) == {"a": 10}
            index.add_pending("a", sent(PROMPT), now=0.0)


def test_num_bytes_covers_the_memory_in_use() -> None:
    index = PrefixIndex()
    addresses = [f"10.0.0.{number}:50051" for number in range(64)]
    for address in addresses:
        index.add_replica(address, CHAIN, 1000)
    tracemalloc.start()
    try:
        for address in addresses:
            index.add_confirmed(address, [os.urandom(16) for _ in range(500)])
            index.add_pending(address, sent([os.urandom(16) for _ in range(100)]), now=0.0)
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert measured < index.num_bytes < 2 * measured


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_a_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    chains = [[b"%d" % first, *(b"%d.%d" % (first, number) for number in range(12))] for first in range(6)]
    index = PrefixIndex()
    naive: dict[str, set[bytes]] = {}
    for _ in range(300):
        address = rng.choice("abcdefgh")
        chain = rng.choice(chains)[: rng.randrange(1, 13)]
        match rng.randrange(6):
            case 0:
                index.add_replica(address, CHAIN, 1000)
                naive[address] = set()
            case 1 if rng.random() < 0.3:
                index.remove_replica(address)
                naive.pop(address, None)
            case 2 if address in naive:  # the tail first, as an engine evicts
                gone = [*chain[rng.randrange(len(chain)) :], b"never stored"]
                longer = [block for other in chains if other[0] == chain[0] for block in other[len(chain) :]]
                index.remove_confirmed(address, [*gone, *longer])
                naive[address].difference_update(gone, longer)
            case 3 | 4 if address in naive:
                index.add_confirmed(address, chain)
                naive[address].update(chain)
            case 5 if address in naive:
                index.clear_confirmed(address)
                naive[address].clear()
        index.check_integrity()
        prompt = rng.choice(chains)
        expected = {}
        for other, blocks in naive.items():
            count = next((number for number, block in enumerate(prompt) if block not in blocks), len(prompt))
            assert index.count_cached(other, prompt) == count
            if count:
                expected[other] = count
        assert matched_lengths(index, prompt) == expected
