"""PrefixIndex with replicas whose hits end at checkpoints, also against fake caches under random histories."""

import os
import random
import tracemalloc
from collections.abc import Sequence

import pytest

from proa.blocks import hash_blocks
from proa.contract import CheckpointRule
from proa.contract.pb import to_pb
from proa.engine.v1 import service_pb2
from proa_gateway.routing.index import PENDING_TIMEOUT, PrefixIndex
from proa_gateway.routing.policies import HashChain, RoutingHints
from proa_gateway.routing.replicas import ReplicaCheckpoints
from support.prefix_cache import FakePrefixCache

ROOT = b"root"
CHAIN = HashChain(ROOT, 16)
RULE = CheckpointRule(interval=512, min_junction=256)
SHARED = list(range(1000, 1300))  # 18 blocks and 12 tokens


def make_index(*addresses: str, rule: CheckpointRule | None = RULE, max_blocks: int = 1000) -> PrefixIndex:
    index = PrefixIndex(max_blocks)
    for address in addresses:
        index.add_replica(address, CHAIN, 100, rule)
    return index


def prompt(*parts: Sequence[int]) -> RoutingHints:
    token_ids = [token_id for part in parts for token_id in part]
    return RoutingHints(hash_blocks(ROOT, token_ids, CHAIN.block_size), CHAIN, len(token_ids))


def matched(index: PrefixIndex, hints: RoutingHints) -> dict[str, int]:
    """Reusable blocks by address, as `match` returns them; `count_cached` must agree."""
    lengths = {address: length for length, addresses in index.match(hints.reusable) for address in addresses}
    for address, length in lengths.items():
        assert index.count_cached(address, hints.reusable) == length
    return lengths


def test_a_hit_ends_at_the_last_checkpoint_in_the_replicas_part() -> None:
    index = make_index("a", "b", "c")
    index.add_replica("plain", CHAIN, 100)
    hints = prompt(range(161))
    for address, length in (("a", 10), ("b", 6), ("c", 3), ("plain", 8)):
        index.add_confirmed(address, hints.block_hashes[:length])
        index.add_checkpoints(address, [hints.block_hashes[3], hints.block_hashes[7]])
    assert matched(index, hints) == {"a": 8, "b": 4, "plain": 8}
    index.remove_checkpoints("a", [hints.block_hashes[7], b"never stored"])
    assert matched(index, hints) == {"a": 4, "b": 4, "plain": 8}
    assert index.count_cached("c", hints.reusable) == 0
    index.check_integrity()


def test_the_last_token_is_computed_even_if_a_checkpoint_is_after_it() -> None:
    index = make_index("a")
    hints = prompt(range(160))
    index.add_confirmed("a", hints.block_hashes)
    index.add_checkpoints("a", [hints.block_hashes[4], hints.block_hashes[9]])
    assert matched(index, hints) == {"a": 5}
    assert index.add_pending("a", hints, now=0.0) == 5
    assert matched(index, prompt(range(161))) == {"a": 10}


def test_a_sent_request_makes_its_prompts_end_and_multiples_of_the_interval_expected() -> None:
    index = make_index("a")
    assert index.add_pending("a", prompt(range(1040)), now=0.0) == 0
    assert matched(index, prompt(range(1040))) == {"a": 64}
    assert matched(index, prompt(range(1024))) == {"a": 32}, "the interval's"
    assert matched(index, prompt(range(500))) == {}


def test_the_second_request_with_a_shared_prefix_makes_the_junction_and_the_third_hits_it() -> None:
    index = make_index("a")
    prompts = [prompt(SHARED, range(number, number + 60)) for number in (0, 100, 200)]
    assert [index.add_pending("a", hints, now=0.0) for hints in prompts] == [0, 0, 18]
    index.check_integrity()


def test_expected_checkpoints_become_confirmed() -> None:
    index = make_index("a")
    hints = prompt(SHARED)
    index.add_pending("a", hints, now=0.0)
    index.add_confirmed("a", hints.block_hashes)
    assert index.has_pending
    index.add_checkpoints("a", hints.block_hashes[17:])
    assert not index.has_pending
    index.add_pending("a", hints, now=PENDING_TIMEOUT)
    assert not index.has_pending, "a confirmed checkpoint is not expected again"
    assert matched(index, hints) == {"a": 18}
    index.check_integrity()


def test_checkpoints_that_are_never_confirmed_time_out() -> None:
    index = make_index("a")
    hints = prompt(SHARED)
    index.add_pending("a", hints, now=0.0)
    index.add_confirmed("a", hints.block_hashes)
    index.add_pending("a", prompt(range(20)), now=PENDING_TIMEOUT)
    assert matched(index, hints) == {}
    index.check_integrity()


def test_without_events_checkpoints_stay_until_the_cache_must_be_full() -> None:
    index = make_index("a")
    index.disable_events("a")
    index.add_pending("a", prompt(SHARED), now=0.0)
    for number in range(5):
        index.add_pending("a", prompt(range(2000 * number, 2000 * number + 300)), now=1e6)
    assert matched(index, prompt(SHARED)) == {}
    assert matched(index, prompt(range(8000, 8300))) == {"a": 18}
    index.check_integrity()


def test_a_snapshot_clears_confirmed_but_not_expected_checkpoints() -> None:
    index = make_index("a")
    index.add_confirmed("a", prompt(range(100)).block_hashes)
    index.add_checkpoints("a", prompt(range(100)).block_hashes[3:4])
    index.add_pending("a", prompt(SHARED), now=0.0)
    index.clear_confirmed("a")
    index.add_confirmed("a", prompt(range(100)).block_hashes)
    assert matched(index, prompt(range(100))) == {}
    assert matched(index, prompt(SHARED)) == {"a": 18}
    index.check_integrity()


def test_a_removed_replica_leaves_no_checkpoints_to_the_next_one() -> None:
    index = make_index("a", "b")
    for address in ("a", "b"):
        index.add_pending(address, prompt(SHARED), now=0.0)
        index.add_confirmed(address, prompt(range(100)).block_hashes)
        index.add_checkpoints(address, prompt(range(100)).block_hashes[3:4])
    index.remove_replica("a")
    index.add_replica("c", CHAIN, 100)
    index.add_confirmed("c", prompt(SHARED).block_hashes[:2])
    assert matched(index, prompt(SHARED)) == {"b": 18, "c": 2}
    index.add_replica("b", CHAIN, 100, RULE)
    index.add_confirmed("b", prompt(range(100)).block_hashes)
    assert matched(index, prompt(range(100))) == {}
    index.check_integrity()


def test_the_number_of_checkpoints_is_bounded() -> None:
    checkpoints = ReplicaCheckpoints(max_checkpoints=10)
    checkpoints.add_replica(1, RULE, CHAIN)
    checkpoints.add_replica(2, RULE, CHAIN)
    first = prompt(range(20))
    checkpoints.expect(1, 0, 0, first, now=0.0)
    checkpoints.confirm(2, first.block_hashes)
    for number in range(30):
        checkpoints.confirm(1, [b"%d" % number])
        checkpoints.expect(2, 0, 0, prompt(range(2000 * number, 2000 * number + 100)), now=0.0)
        checkpoints.check_integrity()
    assert checkpoints.shorten([(1, 3)], first.block_hashes) == [(1, 0)], "evicted, of both replicas"


def test_num_bytes_covers_the_memory_in_use() -> None:
    checkpoints = ReplicaCheckpoints(100_000)
    bits = [1 << number for number in range(64)]
    for bit in bits:
        checkpoints.add_replica(bit, RULE, CHAIN)
    tracemalloc.start()
    try:
        for number, bit in enumerate(bits):
            checkpoints.confirm(bit, [os.urandom(16) for _ in range(500)])
            hashes = [os.urandom(16) for _ in range(100)]
            hints = RoutingHints(hashes, HashChain(ROOT, 512), 100 * 512 + 1)
            checkpoints.add_replica(bit << 64, RULE, HashChain(ROOT, 512))
            checkpoints.expect(bit << 64, 0, 0, hints, now=float(number))
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert measured < checkpoints.num_bytes(128) < 2 * measured


class Engine:
    """A fake cache, and its messages to the index."""

    def __init__(self, index: PrefixIndex, address: str, rule: CheckpointRule) -> None:
        self.cache = FakePrefixCache(to_pb(service_pb2.CheckpointRule, rule), ROOT)
        self.address = address
        self._index = index
        self._messages = self.cache.subscribe()
        index.add_replica(address, CHAIN, 10_000, rule)

    def deliver(self, count: int) -> None:
        """Apply the next messages, at most `count`."""
        for _ in range(min(count, self._messages.qsize())):
            message = self._messages.get_nowait()
            assert message is not None
            self._index.remove_confirmed(self.address, _split(message.removed))
            self._index.add_confirmed(self.address, _split(message.stored))
            self._index.remove_checkpoints(self.address, _split(message.checkpoints_removed))
            self._index.add_checkpoints(self.address, _split(message.checkpoints_stored))
            self._index.check_integrity()


def _split(column: bytes) -> list[bytes]:
    return [column[start : start + 16] for start in range(0, len(column), 16)]


@pytest.mark.parametrize("min_junction", [1, 32, 64])
@pytest.mark.parametrize("interval", [0, 64])
@pytest.mark.parametrize("late", [False, True])
def test_hits_are_predicted_exactly(min_junction: int, interval: int, late: bool) -> None:
    """With events that are applied at once, also evictions and outputs; with late ones, only what was sent."""
    rng = random.Random(min_junction + interval)
    index = make_index(max_blocks=100_000)
    rule = CheckpointRule(interval=interval, min_junction=min_junction)
    engines = [Engine(index, address, rule) for address in "abc"]
    known = [[rng.randrange(3) for _ in range(200)] for _ in range(3)]
    num_hits = 0
    for now in range(400):
        engine, base = rng.choice(engines), rng.choice(known)
        tokens = [*base[: rng.randrange(1, len(base))], *([rng.randrange(3, 9)] * rng.randrange(40))]
        hints = prompt(tokens)
        expected = {one.address: one.cache.hit(tokens)[0] // 16 for one in engines}
        assert dict.fromkeys(expected, 0) | matched(index, hints) == expected
        predicted = index.add_pending(engine.address, hints, now=now / 100)
        assert predicted * 16 == engine.cache.compute(tokens)
        num_hits += predicted > 0
        if late:
            engine.deliver(rng.randrange(3))
            continue
        engine.cache.finish([*tokens, *(rng.randrange(3, 9) for _ in range(rng.randrange(40)))])
        if rng.random() < 0.2:
            kept = {name for base in known for name in prompt(base[: rng.randrange(len(base))]).block_hashes}
            checkpoints = list(engine.cache.checkpoints)
            engine.cache.evict(engine.cache.blocks.keys() - kept, rng.sample(checkpoints, len(checkpoints) // 5))
        engine.deliver(100)
        assert not index.has_pending
    assert num_hits > 50
