"""Pools: blocks, and slots of recurrent states, with the prefix cache that finds their content."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proa_engine.core.kv.block_pool import BlockPool
from proa_engine.core.kv.prefix_cache import PrefixCache
from proa_engine.core.types import Block


@dataclass(frozen=True, slots=True)
class Pools:
    """The memory of the device, or of the host, where blocks are called pages.

    `states` has no slots if the model has no recurrent layers. What refers to a state is then an empty sequence, and no
    operation has to ask for it.
    """

    cache: PrefixCache
    blocks: BlockPool
    states: BlockPool

    @classmethod
    def of(
        cls, num_blocks: int, num_states: int, *, num_windows: int = 0, block_order: Sequence[int] | None = None
    ) -> "Pools":
        """Raises `ValueError` without blocks."""
        if num_blocks < 1:
            raise ValueError(f"the KV cache must hold at least one block, got {num_blocks}")
        cache = PrefixCache(num_windows)
        return cls(cache, BlockPool(num_blocks, cache.evict, order=block_order), BlockPool(num_states, cache.evict))

    @property
    def is_full(self) -> bool:
        """Whether no block or no slot is free."""
        return not self.blocks.num_free_blocks or (self.has_states and not self.states.num_free_blocks)

    @property
    def has_states(self) -> bool:
        return self.states.num_blocks > 0

    def cache_block(self, block: Block, block_hash: bytes) -> None:
        """Cache a full block of table 0, unless a block in use is cached for its hash. A free one is replaced."""
        replaced = self.cache.add(block, block_hash)
        if replaced is not None:
            self.blocks.demote(replaced)

    def touch(self, blocks: Iterable[Block], states: Iterable[Block]) -> None:
        """Add a reference to each block and slot."""
        self.blocks.touch(blocks)
        self.states.touch(states)

    def free(self, blocks: Sequence[Block], states: Sequence[Block]) -> None:
        """Drop a reference to each block and slot. Cached ones stay cached until they are allocated again."""
        self.blocks.free_blocks(blocks)
        self.states.free_blocks(states)

    def check_integrity(self) -> None:
        """Raises `AssertionError` if reference counts, free lists and the prefix cache are inconsistent."""
        self.blocks.check_integrity()
        self.states.check_integrity()
        self.cache.check_integrity([*self.blocks.blocks, *self.states.blocks])
        has_state = [bool(checkpoint.states) for checkpoint in self.cache.checkpoints.values()]
        assert has_state == [self.has_states] * len(has_state)


class PlannedReferences:
    """What the copies of a step reference until the step is planned: no store overwrites the page of a load then, and
    no request gets a slot of the device that is stored."""

    def __init__(self) -> None:
        self.pages: list[Block] = []  # of the host
        self.states: list[Block] = []  # likewise
        self.stored_states: list[Block] = []  # of the device

    def free(self, device: Pools, host: Pools) -> None:
        """Drop all references."""
        host.free(self.pages, self.states)
        device.states.free_blocks(self.stored_states)
        self.pages, self.states, self.stored_states = [], [], []
