"""FreeBlockQueue, BlockPool and PrefixCache: allocation order, references, names and their events."""

import random
from collections.abc import Sequence

import pytest

from proa_engine.core.kv.block_pool import BlockPool, FreeBlockQueue
from proa_engine.core.kv.pools import Pools
from proa_engine.core.kv.prefix_cache import PrefixCache
from proa_engine.core.types import Block


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def pool_of(num_blocks: int, order: Sequence[int] | None = None) -> tuple[BlockPool, PrefixCache]:
    cache = PrefixCache()
    return BlockPool(num_blocks, cache.evict, order=order), cache


def queue_of(count: int) -> tuple[FreeBlockQueue, list[Block]]:
    blocks = [Block(block_id) for block_id in range(count)]
    return FreeBlockQueue(blocks), blocks


def test_queue_pops_in_order() -> None:
    queue, _ = queue_of(3)
    assert [queue.pop_left().block_id for _ in range(3)] == [0, 1, 2]
    assert queue.num_blocks == 0
    assert queue.to_list() == []


@pytest.mark.parametrize("index", [0, 1, 3])
def test_queue_removes_anywhere(index: int) -> None:
    queue, blocks = queue_of(4)
    queue.remove(blocks[index])
    assert ids(queue.to_list()) == [block_id for block_id in range(4) if block_id != index]


def test_queue_takes_blocks_at_both_ends() -> None:
    queue, blocks = queue_of(3)
    queue.remove(blocks[0])
    queue.remove(blocks[1])
    queue.append(blocks[0])
    queue.append_left(blocks[1])
    assert ids(queue.to_list()) == [1, 2, 0]


def test_queue_rejects_removing_absent_and_adding_present_blocks() -> None:
    queue, blocks = queue_of(2)
    with pytest.raises(AssertionError, match="is free already"):
        queue.append(blocks[0])
    queue.remove(blocks[0])
    with pytest.raises(AssertionError, match="is not free"):
        queue.remove(blocks[0])
    queue.pop_left()
    with pytest.raises(AssertionError, match="no block is free"):
        queue.pop_left()


def test_queue_agrees_with_a_list_under_random_use() -> None:
    rng = random.Random(0)
    queue, outside = FreeBlockQueue([]), [Block(block_id) for block_id in range(20)]
    model: list[Block] = []
    for _ in range(2000):
        if outside and rng.random() < 0.5:
            block = outside.pop(rng.randrange(len(outside)))
            if rng.random() < 0.5:
                queue.append(block)
                model.append(block)
            else:
                queue.append_left(block)
                model.insert(0, block)
        elif model:
            if rng.random() < 0.5:
                outside.append(queue.pop_left())
                assert outside[-1] is model.pop(0)
            else:
                outside.append(model.pop(rng.randrange(len(model))))
                queue.remove(outside[-1])
        assert queue.to_list() == model


def test_pool_allocates_blocks_in_the_given_order() -> None:
    pool, cache = pool_of(4, order=[2, 0, 3, 1])
    assert ids(pool.get_new_blocks(3)) == [2, 0, 3]
    assert pool.num_free_blocks == 1
    pool.check_integrity()
    cache.check_integrity(pool.blocks)


def test_a_cache_without_blocks_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one block, got 0"):
        Pools.of(0, 0)


def test_order_must_be_a_permutation() -> None:
    with pytest.raises(AssertionError, match="permutation"):
        pool_of(3, order=[0, 1, 1])


def test_freed_content_is_found_until_its_block_is_allocated_again() -> None:
    pool, cache = pool_of(2)
    block = pool.get_new_blocks(1)
    cache.add(block[0], b"x")
    pool.free_blocks(block)
    assert cache.cached_blocks[b"x"] is block[0]
    pool.get_new_blocks(2)
    assert b"x" not in cache.cached_blocks
    pool.check_integrity()
    cache.check_integrity(pool.blocks)


def test_shared_block_is_free_when_its_last_reference_is_dropped() -> None:
    pool, _ = pool_of(1)
    block = pool.get_new_blocks(1)
    pool.touch(block)
    pool.free_blocks(block)
    assert pool.num_free_blocks == 0
    pool.free_blocks(block)
    assert pool.num_free_blocks == 1
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks(block)


def test_touching_a_free_block_keeps_its_content() -> None:
    pool, cache = pool_of(2)
    block = pool.get_new_blocks(1)
    cache.add(block[0], b"x")
    pool.free_blocks(block)
    pool.touch(block)
    assert pool.num_free_blocks == 1
    pool.get_new_blocks(1)
    assert cache.cached_blocks[b"x"] is block[0]
    pool.check_integrity()
    cache.check_integrity(pool.blocks)


def test_eviction_order_is_unhashed_blocks_then_the_oldest_and_a_sequences_tail_first() -> None:
    pool, cache = pool_of(6)
    first, second = pool.get_new_blocks(3), pool.get_new_blocks(3)
    for block, name in zip([*first[:2], *second[:2]], [b"a", b"b", b"c", b"d"], strict=True):
        cache.add(block, name)
    pool.free_blocks(first)
    pool.free_blocks(second)
    assert ids(pool.get_new_blocks(6)) == [5, 2, 1, 0, 4, 3]


def test_same_content_twice_is_found_once() -> None:
    pool, cache = pool_of(2)
    one, two = pool.get_new_blocks(2)
    cache.add(one, b"x")
    cache.add(two, b"x")
    assert cache.cached_blocks[b"x"] is one
    assert two.cached_in is None
    pool.check_integrity()
    cache.check_integrity(pool.blocks)


def test_reset_clears_hashes_but_not_references() -> None:
    pool, cache = pool_of(2)
    block = pool.get_new_blocks(1)
    cache.add(block[0], b"x")
    cache.reset()
    assert b"x" not in cache.cached_blocks
    assert pool.num_free_blocks == 1
    pool.check_integrity()
    cache.check_integrity(pool.blocks)


def test_integrity_check_detects_a_lost_block() -> None:
    pool, cache = pool_of(2)
    pool.get_new_blocks(1)[0].ref_count = 0
    with pytest.raises(AssertionError, match="differ"):
        pool.check_integrity()
    cache.check_integrity(pool.blocks)
