"""How many KV cache blocks fit, and the error when too few do."""

from dataclasses import replace

import pytest

from proa_engine.config import EngineConfig
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.memory.cache_plan import CachePlan, Place
from proa_engine.memory.host import HostMemory
from proa_engine.memory.kv_cache import (
    CacheSizes,
    WorkerSizes,
    cache_groups,
    check_ranks,
    check_room,
    configured_sizes,
    cpu_budget,
    cpu_sizes,
    divide,
    gpu_sizes,
    host_tier,
    smallest,
    with_host,
)
from proa_engine.memory.requirements import check_weights, weights_room
from proa_engine.option_groups import KvTiers, Parallel

GIB = 2**30
CONFIG = EngineConfig(model="m", max_num_seqs=4)


def plan(windows: tuple[int, ...] = (), state_bytes: int = 0, input_bytes: int = 0) -> CachePlan:
    return CachePlan(16, 1024, windows, (Place(0, 0),), state_bytes, checkpoint_interval=512, input_bytes=input_bytes)


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
    assert configured_sizes(CONFIG, plan()) is None
    in_bytes = replace(CONFIG, kv_cache_memory_bytes=10_000)
    assert configured_sizes(in_bytes, plan()) == CacheSizes(9, 0, 4)
    assert configured_sizes(replace(in_bytes, num_gpu_blocks_override=7), plan()) == CacheSizes(7, 0, 4)


def test_blocks_and_cached_states_share_what_live_states_leave() -> None:
    with_states = plan(state_bytes=2048)
    assert divide(5 * 2048 + 80 * 1024, with_states, 4) == CacheSizes(60, 5 + 10, 4)
    configured = configured_sizes(replace(CONFIG, num_gpu_blocks_override=60), with_states)
    assert configured == CacheSizes(60, 5 + 10, 4)


def test_fewer_requests_run_where_their_states_would_take_more_than_half() -> None:
    assert divide(16 * 1024, plan(state_bytes=2048), 4) == CacheSizes(6, 4 + 1, 3)
    with pytest.raises(ValueError, match=r"state of one request takes 0.00 GiB: raise kv_cache_memory_bytes"):
        divide(8191, plan(state_bytes=4096), 4)


def test_a_request_with_drafts_also_needs_the_inputs_of_a_step() -> None:
    caches = plan(state_bytes=2048, input_bytes=256)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    of_requests = 3 * (2048 + 4 * 256)
    configured = replace(CONFIG, max_num_seqs=3, kv_cache_memory_bytes=of_requests + 2048 + 40 * 1024)
    assert configured_sizes(replace(configured, speculative_config=drafts), caches) == CacheSizes(30, 4 + 5, 3)
    assert configured_sizes(configured, caches) == CacheSizes(33, 4 + 5, 3), "without drafts nothing is kept"
    assert divide(16 * 1024, caches, 4, 4) == CacheSizes(6, 3 + 1, 2)


def test_a_cpu_gets_no_more_than_full_requests_in_every_slot_use() -> None:
    assert cpu_sizes(GIB, CONFIG, plan(), 100) == CacheSizes(7 * 4, 0, 4)
    assert cpu_sizes(10 * 1024, CONFIG, plan(), 100) == CacheSizes(10, 0, 4)
    small_steps = replace(CONFIG, max_num_batched_tokens=16)
    assert cpu_sizes(GIB, small_steps, plan((33,)), 1000) == CacheSizes((63 + 5) * 4, 0, 4)
    assert cpu_sizes(GIB, CONFIG, plan(state_bytes=1024), 100) == CacheSizes(28, 5 + 9, 4)


def test_a_gpu_gets_twice_as_many_blocks_or_a_number_that_costs_nothing() -> None:
    assert gpu_sizes(10 * 1024, CONFIG, plan(), 100) == CacheSizes(10, 0, 4)
    assert gpu_sizes(GIB, CONFIG, plan(), 100) == CacheSizes(1 << 17, 0, 4)
    assert gpu_sizes(GIB, CONFIG, plan(), 16 * 50_000) == CacheSizes(2 * 4 * 50_000, 0, 4)


def test_ranks_use_what_fits_on_each() -> None:
    assert smallest([CacheSizes(7, 5, 4), CacheSizes(8, 4, 3)]) == CacheSizes(7, 4, 3)


def test_a_cache_below_one_full_request_is_rejected_with_what_to_change() -> None:
    def check(num_blocks: int, *, reads_images: bool = False) -> None:
        groups = cache_groups(CONFIG, plan(), CacheSizes(num_blocks, 0, 4))
        check_room(groups, 1024, 100, reads_images=reads_images)

    check(7)
    with pytest.raises(ValueError, match=r"room for 6 blocks.* needs 7 .*lower max_model_len to at most 96.*raise"):
        check(6)
    with pytest.raises(ValueError, match=r"room for 0 blocks.*take a smaller model, raise"):
        check(-5)
    with pytest.raises(ValueError, match=r"to at most 96, or set it to auto, take less memory for images \(encoder_"):
        check(6, reads_images=True)


def test_weights_that_do_not_fit_are_rejected_before_loading() -> None:
    check_weights(5 * GIB, 5 * GIB)
    with pytest.raises(ValueError, match=r"weights take 5.00 GiB .* it has 4.00 GiB of memory: .*smaller model"):
        check_weights(5 * GIB, 4 * GIB)


def test_room_for_weights_is_the_container_limit_or_available_memory_divided_by_ranks() -> None:
    assert weights_room(HostMemory(limit=10 * GIB, available=64 * GIB, process=GIB), ranks_here=1) == 10 * GIB
    assert weights_room(HostMemory(limit=10 * GIB, available=8 * GIB, process=GIB), ranks_here=1) == 8 * GIB
    assert weights_room(HostMemory(limit=None, available=8 * GIB, process=GIB), ranks_here=2) == 4 * GIB


def test_the_host_tier_has_pages_and_states_of_its_share() -> None:
    config = replace(CONFIG, kv_tiers=KvTiers(kv_offloading_size=1.0), parallel=Parallel(tensor_parallel_size=2))
    sizes = CacheSizes(9, 0, 4)
    assert with_host(sizes, CONFIG, plan()) is sizes
    assert with_host(sizes, config, plan()) == replace(sizes, num_host_pages=GIB // 2 // 1024)
    with_states = with_host(sizes, config, plan(state_bytes=2048))
    assert with_states.num_host_states * 2048 == GIB // 8
    assert with_states.num_host_pages * 1024 == GIB // 2 - GIB // 8


def test_a_host_tier_that_would_hold_nothing_is_refused() -> None:
    sizes, small = CacheSizes(9, 0, 4), replace(CONFIG, kv_tiers=KvTiers(kv_offloading_size=1e-6))
    with pytest.raises(ValueError, match=r"kv_offloading_size is 1e-06 GiB, \d.* on this rank, but .* raise it"):
        with_host(sizes, replace(small, parallel=Parallel(tensor_parallel_size=2)), plan())
    with pytest.raises(ValueError, match="raise it"):
        with_host(sizes, small, plan(state_bytes=4096))
    with pytest.raises(ValueError, match="kv_offloading_size is set, but the model keeps no KV cache"):
        with_host(sizes, replace(CONFIG, kv_tiers=KvTiers(kv_offloading_size=1.0)), replace(plan(), block_bytes=0))


def test_copies_of_a_step_are_limited_by_the_rank_with_the_largest_blocks() -> None:
    sizes = CacheSizes(9, 4, 4, num_host_pages=100, num_host_states=5)
    config = replace(CONFIG, kv_tiers=KvTiers(kv_offloading_size=1.0), parallel=Parallel(pipeline_parallel_size=2))
    states = WorkerSizes(sizes, block_bytes=1, weight_bytes=1, tables=(), state_bytes=1 << 20)
    blocks = WorkerSizes(replace(sizes, num_host_pages=90), 1 << 18, weight_bytes=1, tables=(0,), state_bytes=0)

    tier = host_tier(config, [states, blocks], "cpu", load_rate=1e9)

    assert tier is not None
    assert (tier.num_pages, tier.num_states) == (90, 5)
    assert (tier.page_bytes, tier.max_step_pages, tier.state_pages) == (1 << 18, 32, 4)
    assert tier.load_bytes_per_second == 0.0  # not known: rank 0 has measured copies of nothing
    first = host_tier(config, [blocks, states], "cpu", load_rate=1e9)
    assert first is not None
    assert first.load_bytes_per_second == 2e9


def sizes_of_rank(block_bytes: int = 1, tables: tuple[int, ...] = (0, 1, 1)) -> WorkerSizes:
    return WorkerSizes(CacheSizes(8, 0, 2), block_bytes, weight_bytes=1, tables=tables)


def test_ranks_whose_layers_are_in_other_tables_are_refused() -> None:
    config = replace(CONFIG, parallel=Parallel(tensor_parallel_size=2))
    first, second = sizes_of_rank(), sizes_of_rank(tables=(0, 1, 2))
    check_ranks(config, [first, first, second, second])
    with pytest.raises(ValueError, match=r"not divisible by tensor_parallel_size \(2\): use a size that divides them"):
        check_ranks(config, [first, first, first, second])


def test_host_memory_is_not_adopted_by_ranks_with_unequal_blocks() -> None:
    config = replace(CONFIG, parallel=Parallel(tensor_parallel_size=2))
    adopting = replace(config, kv_tiers=KvTiers(kv_offloading_size=1.0, kv_offloading_path="/host"))
    check_ranks(config, [sizes_of_rank(3), sizes_of_rank(2)])
    check_ranks(adopting, [sizes_of_rank(3), sizes_of_rank(3)])
    with pytest.raises(ValueError, match="kv_offloading_path is set, but the ranks have KV caches of different sizes"):
        check_ranks(adopting, [sizes_of_rank(3), sizes_of_rank(2)])
