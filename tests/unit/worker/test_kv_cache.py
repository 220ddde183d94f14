"""How many blocks fit, and what is said when too few do."""

import pytest

from proa_engine.config import EngineConfig
from proa_engine.worker.host import HostMemory
from proa_engine.worker.kv_cache import CacheLayout, check_room, check_weights, cpu_budget, given_blocks, weights_room

GIB = 2**30


def layout(**changes: int) -> CacheLayout:
    return CacheLayout(**{"block_size": 16, "block_bytes": 1024, "max_model_len": 100, "max_num_seqs": 4} | changes)


def test_container_limit_bounds_what_this_process_and_its_cache_take() -> None:
    memory = HostMemory(limit=10 * GIB, available=64 * GIB, process=2 * GIB)
    assert cpu_budget(memory, utilization=0.9, ranks_here=1, workspace=GIB) == 6 * GIB
    assert cpu_budget(memory, utilization=0.9, ranks_here=2, workspace=GIB) == 1.5 * GIB


def test_full_machine_bounds_a_generous_container() -> None:
    memory = HostMemory(limit=100 * GIB, available=4 * GIB, process=2 * GIB)
    assert cpu_budget(memory, utilization=0.9, ranks_here=1, workspace=GIB) == 3 * GIB


def test_without_a_container_half_of_what_is_available_is_left_to_others() -> None:
    memory = HostMemory(limit=None, available=8 * GIB, process=2 * GIB)
    assert cpu_budget(memory, utilization=0.9, ranks_here=1, workspace=GIB) == 3 * GIB


def test_blocks_given_by_number_win_over_bytes() -> None:
    assert given_blocks(EngineConfig(model="m"), layout()) is None
    assert given_blocks(EngineConfig(model="m", kv_cache_memory_bytes=10_000), layout()) == 9
    given = EngineConfig(model="m", kv_cache_memory_bytes=10_000, num_gpu_blocks_override=7)
    assert given_blocks(given, layout()) == 7


def test_more_than_every_slot_can_use_is_not_useful() -> None:
    assert layout().most_useful_blocks == 7 * 4


def test_too_small_a_cache_is_refused_and_says_what_to_change() -> None:
    check_room(7, layout())
    with pytest.raises(ValueError, match=r"room for 6 blocks.* needs 7 .*lower max_model_len to at most 96.*raise"):
        check_room(6, layout())
    with pytest.raises(ValueError, match=r"room for 0 blocks.*take a smaller model"):
        check_room(-5, layout())


def test_weights_beyond_the_room_are_refused_before_they_are_loaded() -> None:
    check_weights(5 * GIB, 5 * GIB)
    with pytest.raises(ValueError, match=r"weights take 5.00 GiB .* it has 4.00 GiB of memory: .*smaller model"):
        check_weights(5 * GIB, 4 * GIB)


def test_room_for_weights_is_the_containers_limit_or_what_the_machine_has_left_shared_by_the_ranks() -> None:
    assert weights_room(HostMemory(limit=10 * GIB, available=64 * GIB, process=GIB), ranks_here=1) == 10 * GIB
    assert weights_room(HostMemory(limit=10 * GIB, available=8 * GIB, process=GIB), ranks_here=1) == 8 * GIB
    assert weights_room(HostMemory(limit=None, available=8 * GIB, process=GIB), ranks_here=2) == 4 * GIB
