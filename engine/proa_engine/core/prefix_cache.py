"""PrefixCache: the blocks that can be found by their hashes, and the events of their changes."""

from proa_engine.core.block_pool import Block
from proa_engine.core.kv_events import KvEvents

Names = dict[bytes, Block]


class PrefixCache:
    """Named blocks. A hash names one block: another one with the same content gets no name.

    `kv_events` records the hashes added and removed.
    """

    def __init__(self) -> None:
        self.names: Names = {}
        self.kv_events = KvEvents(self.names.keys())

    def add(self, block: Block, block_hash: bytes) -> None:
        """Name a full block, unless the hash names another one already."""
        if self.names.setdefault(block_hash, block) is block:
            block.names, block.block_hash = self.names, block_hash
            self.kv_events.stored(block_hash)

    def evict(self, block: Block) -> None:
        """Remove the block's name."""
        assert block.names is not None
        del block.names[block.block_hash]
        block.names = None
        self.kv_events.removed(block.block_hash)

    def reset(self) -> None:
        """Remove all names."""
        for block in self.names.values():
            block.names = None
        self.names.clear()
        self.kv_events.reset()

    def check_integrity(self, blocks: list[Block]) -> None:
        """Raises `AssertionError` unless exactly the blocks with a name, of all `blocks`, are found by their hashes."""
        named = {block.block_hash: block for block in blocks if block.names is self.names}
        assert named == self.names, "hashes and blocks differ"
        assert len(named) == sum(block.names is not None for block in blocks)
