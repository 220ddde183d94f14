"""Blocks in host memory count less than those on the device, and more than none; and who holds how many of either."""

import pytest

from proa.contract import CheckpointRule, KvTransfer, SchedulerStats
from proa_gateway.routing.index import HOST_HIT_WEIGHT, MAX_HOLDERS, MAX_HOST_HIT_WEIGHT, TieredIndex, host_hit_weight
from proa_gateway.routing.policies import HashChain, RoutingHints
from support.model_info import model_info

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


@pytest.mark.parametrize(
    ("load_rate", "prefill_rate", "expected"),
    [
        (1e9, 16_000.0, 0.9),  # 0.1 ms to load a block, 1 ms to compute it
        (2e8, 16_000.0, 0.5),
        (1e7, 16_000.0, 0.0),  # computing is faster
        (1e12, 16_000.0, MAX_HOST_HIT_WEIGHT),
        (0.0, 16_000.0, HOST_HIT_WEIGHT),  # not known
        (1e9, 0.0, HOST_HIT_WEIGHT),
    ],
)
def test_a_host_hit_saves_the_time_of_computing_less_that_of_the_load(
    load_rate: float, prefill_rate: float, expected: float
) -> None:
    transfer = KvTransfer(fingerprint=b"f", ports=(1,), block_bytes=100_000)
    stats = SchedulerStats(load_bytes_per_second=load_rate, prefill_tokens_per_second=prefill_rate)
    assert host_hit_weight(model_info(kv_transfer=transfer), stats) == pytest.approx(expected)
    assert host_hit_weight(model_info(), stats) == HOST_HIT_WEIGHT


def test_each_engine_has_its_own_weight_of_host_hits() -> None:
    index = TieredIndex()
    weights = {"a": 0.5, "b": 0.9}
    for name in weights:
        index.add_engine(name, CHAIN, 100, 1000, host_weight=lambda name=name: weights[name])  # type: ignore[misc]
        index.host.add_confirmed(name, BLOCKS)
    assert dict((name, length) for length, (name,) in index.match(BLOCKS)) == pytest.approx({"a": 5.0, "b": 9.0})
    weights["a"] = 0.95  # as measured later
    assert dict((name, length) for length, (name,) in index.match(BLOCKS)) == pytest.approx({"a": 9.5, "b": 9.0})


def test_holders_are_those_with_more_confirmed_blocks_in_either_tier() -> None:
    index = index_of(a=(4, 6), b=(7, 2), c=(3, 3), d=(9, 9))
    loads = {"a": 0.0, "b": 0.0, "c": 0.0}
    assert index.holders(BLOCKS, loads, 3) == {"a": 6, "b": 7}
    index.add_pending("c", RoutingHints(BLOCKS, CHAIN, 41), 0.0)
    assert index.holders(BLOCKS, loads, 3) == {"a": 6, "b": 7}


def test_a_holder_has_no_more_blocks_than_those_before_its_first_missing_one() -> None:
    index = index_of(a=(10, 0), b=(8, 0))
    index.device.remove_confirmed("a", [BLOCKS[2]])
    assert index.holders(BLOCKS, {"a": 0.0, "b": 0.0}, 3) == {"b": 8}


def test_of_many_equal_holders_the_cheapest_are_returned() -> None:
    names = [f"e{number}" for number in range(3 * MAX_HOLDERS)]
    index = index_of(**dict.fromkeys(names, (5, 0)))
    costs = {name: float(len(names) - number) for number, name in enumerate(names)}
    assert list(index.holders(BLOCKS, costs, 0)) == names[: -MAX_HOLDERS - 1 : -1]


def test_the_blocks_of_a_holder_with_checkpoints_end_at_one() -> None:
    index = TieredIndex()
    index.add_engine("a", CHAIN, 100, rule=CheckpointRule(interval=8, min_junction=8))
    index.device.add_confirmed("a", BLOCKS)
    assert index.holders(BLOCKS, {"a": 0.0}, 0) == {}
    index.device.add_checkpoints("a", [BLOCKS[5]])
    assert index.holders(BLOCKS, {"a": 0.0}, 0) == {"a": 6}
