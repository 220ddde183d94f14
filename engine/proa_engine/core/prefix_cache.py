"""PrefixCache: the blocks that can be found by their hashes, the checkpoints, and the events of their changes.

A request continues a cached prefix only where everything that its next token reads is cached. With full attention that
is all blocks of table 0 so far, so it may be any block's end. A table with a window keeps only the blocks that running
requests still attend to, and a recurrent state is that of one position. So for models with these, a checkpoint says
where the blocks behind the window, in all tables, and the state are cached too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proa_engine.core.block_pool import Block
from proa_engine.core.kv_events import KvEvents

Names = dict[bytes, Block]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What is needed to continue at a block boundary, beside the blocks of table 0 before it.

    `tails` are the blocks behind the window, by table with a window.
    """

    tails: list[list[Block]]
    state: Block | None

    @property
    def blocks(self) -> list[Block]:
        blocks = [block for tail in self.tails for block in tail]
        return blocks if self.state is None else [*blocks, self.state]


class PrefixCache:
    """Named blocks, by table and hash, and checkpoints, by the hash of the block before them.

    A hash names one block of a table: another one with the same content gets no name. All full blocks of table 0 are
    named. The others are named while a checkpoint needs them. If one is evicted, its checkpoints are removed, also from
    their other blocks: else blocks that many checkpoints share would collect them without limit. If a block of table 0
    is evicted, a checkpoint behind it cannot be used until the block is computed again.

    `kv_events` records the hashes added and removed.
    """

    def __init__(self, num_windows: int = 0) -> None:
        self.names: Names = {}  # of table 0
        self.window_names: list[Names] = [{} for _ in range(num_windows)]
        self.state_names: Names = {}
        self.checkpoints: dict[bytes, Checkpoint] = {}
        self.kv_events = KvEvents(self.names.keys(), self.checkpoints.keys())

    def add(self, block: Block, block_hash: bytes) -> Block | None:
        """Name a full block of table 0, unless the hash names another one that is in use.

        A free one loses the name and is returned: it was computed again, for a prefix behind the last checkpoint, and
        would be evicted long before the blocks that follow it.
        """
        named = self.names.setdefault(block_hash, block)
        if named is block:
            self.kv_events.stored(block_hash)
        elif named.ref_count == 0:
            self.names[block_hash], named.names = block, None
        else:
            return None
        block.names, block.block_hash = self.names, block_hash
        return None if named is block else named

    def add_checkpoint(
        self, checkpoint_hash: bytes, tails: Sequence[Sequence[tuple[bytes, Block]]], state: Block | None
    ) -> Checkpoint:
        """Make a checkpoint, which must not exist, of the windows' blocks with their hashes, and a state.

        A block whose hash names another one is replaced by that one in the checkpoint.
        """
        named = [
            [_name(names, block_hash, block) for block_hash, block in tail]
            for names, tail in zip(self.window_names, tails, strict=True)
        ]
        if state is not None:
            _name(self.state_names, checkpoint_hash, state)
        assert checkpoint_hash not in self.checkpoints
        checkpoint = self.checkpoints[checkpoint_hash] = Checkpoint(named, state)
        for block in checkpoint.blocks:
            assert block.checkpoints is not None
            block.checkpoints.add(checkpoint_hash)
        self.kv_events.checkpoint_stored(checkpoint_hash)
        return checkpoint

    def evict(self, block: Block) -> None:
        """Remove the block's name and the checkpoints that need the block."""
        if block.names is self.names:
            del self.names[block.block_hash]
            block.names = None
            self.kv_events.removed(block.block_hash)
            return
        assert block.checkpoints
        for checkpoint_hash in list(block.checkpoints):
            self._remove_checkpoint(checkpoint_hash)

    def reset(self) -> None:
        """Remove all names and checkpoints."""
        for names in (self.names, *self.window_names, self.state_names):
            for block in names.values():
                block.names = block.checkpoints = None
            names.clear()
        self.checkpoints.clear()
        self.kv_events.reset()

    def check_integrity(self, blocks: list[Block]) -> None:
        """Raises `AssertionError` unless exactly the blocks with a name, of all `blocks`, are found by their hashes."""
        all_names = (self.names, *self.window_names, self.state_names)
        for names in all_names:
            named = {block.block_hash: block for block in blocks if block.names is names}
            assert named == names, "hashes and blocks differ"
        assert sum(map(len, all_names)) == sum(block.names is not None for block in blocks)
        needed: dict[Block, set[bytes]] = {}
        for checkpoint_hash, checkpoint in self.checkpoints.items():
            assert all(checkpoint.tails), "a checkpoint needs blocks of all tables with windows"
            assert all(block.names is not None for block in checkpoint.blocks), (
                "a checkpoint needs a block without name"
            )
            for block in checkpoint.blocks:
                needed.setdefault(block, set()).add(checkpoint_hash)
        linked = {block: block.checkpoints for block in blocks if block.checkpoints is not None}
        assert linked == needed, "checkpoints and their blocks differ"
        assert all((block.names is None or block.names is self.names) == (block not in needed) for block in blocks)

    def _remove_checkpoint(self, checkpoint_hash: bytes) -> None:
        for block in self.checkpoints.pop(checkpoint_hash).blocks:
            assert block.checkpoints is not None
            block.checkpoints.remove(checkpoint_hash)
            if not block.checkpoints:
                assert block.names is not None
                del block.names[block.block_hash]
                block.names = block.checkpoints = None
        self.kv_events.checkpoint_removed(checkpoint_hash)


def _name(names: Names, block_hash: bytes, block: Block) -> Block:
    """The block that the hash names, which is `block` if it named none."""
    named = names.setdefault(block_hash, block)
    if named is block and block.names is None:
        block.names, block.block_hash, block.checkpoints = names, block_hash, set()
    return named
