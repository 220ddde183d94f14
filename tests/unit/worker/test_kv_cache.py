"""How many KV cache blocks fit, and the error when too few do."""

import pytest

from proa_engine.config import EngineConfig
from proa_engine.worker.host import HostMemory
from proa_engine.worker.kv_cache import (
    CacheLayout,
    check_room,
    check_weights,
    configured_blocks,
    cpu_budget,
    weights_room,
)

GIB = 2**30


def layout(**changes: int) -> CacheLayout:
    return CacheLayout(**{"block_size": 16, "block_bytes": 1024, "max_model_len": 100, "max_num_seqs": 4} | changes)


def test_the_container_limit_covers_the_process_and_its_cache() -> None:
    memory = HostMemory(limit=10 * GIB, available=64 * GIB, process=2 * GIB)
    assert cpu_budget(memory, utilization=0.9, ranks_here=1, workspace=GIB) == 6 * GIB
    assert cpu_budget(memory, utilization=0.9, ranks_here=2, workspace=GIB) == 1.5 * GIB


def test_available_memory_limits_a_large_container() -> None:
    memory = HostMemory(limit=100 * GIB, available=4 * GIB, process=2 * GIB)
    assert cpu_budget(memory, utilization=0.9, ranks_here=1, workspace=GIB) == 3 * GIB


def test_without_a_container_half_of_the_available_memory_is_used() -> None:
    memory = HostMemory(limit=None, available=8 * GIB, process=2 * GIB)
    assert cpu_budget(memory, utilization=0.9, ranks_here=1, workspace=GIB) == 3 * GIB


def test_a_configured_number_of_blocks_wins_over_bytes() -> None:
    assert configured_blocks(EngineConfig(model="m"), layout()) is None
    assert configured_blocks(EngineConfig(model="m", kv_cache_memory_bytes=10_000), layout()) == 9
    given = EngineConfig(model="m", kv_cache_memory_bytes=10_000, num_gpu_blocks_override=7)
    assert configured_blocks(given, layout()) == 7


def test_useful_blocks_are_those_of_full_requests_in_every_slot() -> None:
    assert layout().max_useful_blocks == 7 * 4


def test_a_cache_below_one_full_request_is_rejected_with_what_to_change() -> None:
    check_room(7, layout())
    with pytest.raises(ValueError, match=r"room for 6 blocks.* needs 7 .*lower max_model_len to at most 96.*raise"):
        check_room(6, layout())
    with pytest.raises(ValueError, match=r"room for 0 blocks.*take a smaller model"):
        check_room(-5, layout())


def test_weights_that_do_not_fit_are_rejected_before_loading() -> None:
    check_weights(5 * GIB, 5 * GIB)
    with pytest.raises(ValueError, match=r"weights take 5.00 GiB .* it has 4.00 GiB of memory: .*smaller model"):
        check_weights(5 * GIB, 4 * GIB)


def test_room_for_weights_is_the_container_limit_or_available_memory_divided_by_ranks() -> None:
    assert weights_room(HostMemory(limit=10 * GIB, available=64 * GIB, process=GIB), ranks_here=1) == 10 * GIB
    assert weights_room(HostMemory(limit=10 * GIB, available=8 * GIB, process=GIB), ranks_here=1) == 8 * GIB
    assert weights_room(HostMemory(limit=None, available=8 * GIB, process=GIB), ranks_here=2) == 4 * GIB
