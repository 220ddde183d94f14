"""Blocks in host memory count less than those on the device, and more than none."""

import pytest

from proa_gateway.routing.hints import HashChain, RoutingHints
from proa_gateway.routing.tiers import HOST_HIT_WEIGHT, TieredIndex

CHAIN = HashChain(b"root", 4)
BLOCKS = [bytes([number]) * 16 for number in range(10)]


def index_of(**engines: tuple[int, int]) -> TieredIndex:
    """Engines by name, each with so many blocks on the device and in host memory."""
    index = TieredIndex()
    for name, (on_device, in_host) in engines.items():
        index.add_engine(name, CHAIN, 100, 1000)
        index.device.add_confirmed(name, BLOCKS[:on_device])
        index.host.add_confirmed(name, BLOCKS[:in_host])
    return index


def test_a_host_hit_counts_less_than_a_device_hit_and_more_than_none() -> None:
    matched = index_of(a=(4, 4), b=(0, 4), c=(2, 10), d=(0, 0)).match(BLOCKS)
    assert [addresses for _, addresses in matched] == [["c"], ["a"], ["b"]]
    assert [length for length, _ in matched] == pytest.approx([2 + 8 * HOST_HIT_WEIGHT, 4, 4 * HOST_HIT_WEIGHT])


def test_what_is_expected_to_be_cached_is_the_longer_of_both() -> None:
    index, hints = index_of(a=(4, 6), b=(3, 0)), RoutingHints(BLOCKS, CHAIN, 41)
    assert [index.add_pending(name, hints, 0.0) for name in "ab"] == [6, 3]


def test_an_engine_without_host_memory_is_matched_by_its_device_alone() -> None:
    index = index_of(a=(0, 3))
    index.add_engine("b", CHAIN, 100)
    index.device.add_confirmed("b", BLOCKS[:5])
    assert index.match(BLOCKS) == [(5, ["b"]), (pytest.approx(3 * HOST_HIT_WEIGHT), ["a"])]


def test_a_removed_engine_leaves_nothing_in_either_tier() -> None:
    index = index_of(a=(4, 6))
    index.remove_engine("a")
    assert index.num_blocks == 0
    assert index.match(BLOCKS) == []
