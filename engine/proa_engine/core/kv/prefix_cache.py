"""PrefixCache: the cached blocks by hash, the checkpoints, and the events of their changes.

A request can continue a cached prefix only where everything that its next token reads is cached. With full attention
that is all blocks of table 0 so far, so it may be any block's end. A table with a window keeps only the blocks that
running requests still attend to, and a recurrent state belongs to one position. So models with these have checkpoints:
positions at which the blocks behind the window, in all tables, and the state are cached too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from proa.contract import embeds_keys
from proa_engine.core.kv.encoder_blocks import EncoderBlocks
from proa_engine.core.kv_events import KvEvents
from proa_engine.core.request import Request
from proa_engine.core.types import Block

# (hash of the block before, this block's token ids, extra keys) -> hash of this block
BlockHashFunction = Callable[[bytes, Sequence[int], Sequence[bytes | str]], bytes]


class BlockHashes:
    """Hashes of requests' blocks. `root` is the parent hash of every sequence's first block."""

    def __init__(self, hash_block: BlockHashFunction, root: bytes, block_size: int) -> None:
        self._hash_block = hash_block
        self._root = root
        self._block_size = block_size

    def of(self, request: Request, index: int) -> bytes:
        """Return the hash of the request's block `index`. Its tokens must be known and its earlier blocks hashed."""
        hashes = request.block_hashes
        if index == len(hashes):
            start, end = index * self._block_size, (index + 1) * self._block_size
            parent = hashes[-1] if hashes else self._root
            keys = request.media.extra_keys(request.extra_keys, start, end)
            if request.prompt_embeds:
                keys = (*keys, *embeds_keys(request.prompt_embeds, start, end))
            hashes.append(self._hash_block(parent, request.token_ids[start:end], keys))
        return hashes[index]

    def full_blocks(self, request: Request) -> Iterator[bytes]:
        """Yield the hashes of the request's full blocks before its last token."""
        return (self.of(request, index) for index in range((request.num_tokens - 1) // self._block_size))


BlocksByHash = dict[bytes, Block]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a request needs to continue at a block boundary, beside the blocks of table 0 before it.

    `window_blocks` are the blocks behind the window, by table with a window. `states` is the slot with the states
    there, empty without recurrent layers.
    """

    window_blocks: Sequence[Sequence[Block]]
    states: Sequence[Block]

    @property
    def blocks(self) -> list[Block]:
        return [*chain.from_iterable(self.window_blocks), *self.states]


NO_CHECKPOINT = Checkpoint((), ())


class PrefixCache:
    """Cached blocks, by table and hash, and checkpoints, by the hash of the block before them.

    At most one block of a table is cached for a hash. All full blocks of table 0 are cached, those of other tables only
    while a checkpoint needs them. If one of these is evicted, its checkpoints are removed, also from their other
    blocks; otherwise blocks that many checkpoints share would collect them without limit. If a block of table 0 is
    evicted, a checkpoint behind it cannot be used until the block is computed again.

    `kv_events` records the hashes added and removed.
    """

    def __init__(self, num_windows: int = 0) -> None:
        self.cached_blocks: BlocksByHash = {}  # of table 0
        self.cached_window_blocks: list[BlocksByHash] = [{} for _ in range(num_windows)]
        self.cached_states: BlocksByHash = {}
        self.checkpoints: dict[bytes, Checkpoint] = {}
        self.encoder_blocks = EncoderBlocks()
        self.kv_events = KvEvents(self.cached_blocks.keys(), self.checkpoints.keys())

    def add(self, block: Block, block_hash: bytes) -> Block | None:
        """Cache a full block of table 0, unless a block in use is cached for its hash already.

        A free block with that hash is replaced and returned: it was computed again, for a prefix behind the last
        checkpoint, and would be evicted long before the blocks that follow it.
        """
        cached = self.cached_blocks.setdefault(block_hash, block)
        if cached is block:
            self.kv_events.blocks.store(block_hash)
        elif cached.ref_count == 0:
            self.cached_blocks[block_hash], cached.cached_in = block, None
        else:
            return None
        block.cached_in, block.block_hash = self.cached_blocks, block_hash
        return None if cached is block else cached

    def add_checkpoint(
        self, checkpoint_hash: bytes, window_blocks: Sequence[Sequence[tuple[bytes, Block]]], states: Sequence[Block]
    ) -> Checkpoint:
        """Add a checkpoint of the windows' blocks, given with their hashes, and a state. It must not exist yet.

        If another block is cached for the hash of one of them, the checkpoint uses that block.
        """
        cached = [
            [_cache(blocks, block_hash, block) for block_hash, block in hashed]
            for blocks, hashed in zip(self.cached_window_blocks, window_blocks, strict=True)
        ]
        for state in states:
            _cache(self.cached_states, checkpoint_hash, state)
        assert checkpoint_hash not in self.checkpoints
        checkpoint = self.checkpoints[checkpoint_hash] = Checkpoint(cached, states)
        for block in checkpoint.blocks:
            assert block.checkpoints is not None
            block.checkpoints.add(checkpoint_hash)
        self.kv_events.checkpoints.store(checkpoint_hash)
        return checkpoint

    def evict(self, block: Block) -> Sequence[Block]:
        """Remove the block from the cache, with the checkpoints that need it. Returns the other blocks of its audio, if
        it has one."""
        if block.cached_in is self.cached_blocks:
            del self.cached_blocks[block.block_hash]
            block.cached_in = None
            self.kv_events.blocks.remove(block.block_hash)
            return ()
        if block.cached_in is self.encoder_blocks.cached:
            return self.encoder_blocks.evict(block)
        assert block.checkpoints
        for checkpoint_hash in list(block.checkpoints):
            self._remove_checkpoint(checkpoint_hash)
        return ()

    def reset(self) -> None:
        """Remove all blocks, checkpoints and encoded audios."""
        for blocks in (self.cached_blocks, *self.cached_window_blocks, self.cached_states):
            for block in blocks.values():
                block.cached_in = block.checkpoints = None
            blocks.clear()
        self.checkpoints.clear()
        self.encoder_blocks.reset()
        self.kv_events.reset()

    def check_integrity(self, blocks: list[Block]) -> None:
        """Raises `AssertionError` unless exactly those of `blocks` that are marked as cached can be found by their
        hashes."""
        maps = (self.cached_blocks, *self.cached_window_blocks, self.cached_states)
        audios = self.encoder_blocks.cached
        self.encoder_blocks.check_integrity([block for block in blocks if block.cached_in is audios])
        marked = [
            block
            for block in blocks
            if (block.cached_in, block.checkpoints) != (None, None) and block.cached_in is not audios
        ]
        for cached in maps:
            of_map = {block.block_hash: block for block in marked if block.cached_in is cached}
            assert of_map == cached, "hashes and blocks differ"
        assert sum(map(len, maps)) == sum(block.cached_in is not None for block in marked)
        needed: dict[Block, set[bytes]] = {}
        for checkpoint_hash, checkpoint in self.checkpoints.items():
            assert all(checkpoint.window_blocks), "a checkpoint needs blocks of all tables with windows"
            assert all(block.cached_in is not None for block in checkpoint.blocks), (
                "a checkpoint needs a block that is not cached"
            )
            for block in checkpoint.blocks:
                needed.setdefault(block, set()).add(checkpoint_hash)
        linked = {block: block.checkpoints for block in marked if block.checkpoints is not None}
        assert linked == needed, "checkpoints and their blocks differ"
        assert all(
            (block.cached_in is None or block.cached_in is self.cached_blocks) == (block not in needed)
            for block in marked
        )

    def _remove_checkpoint(self, checkpoint_hash: bytes) -> None:
        for block in self.checkpoints.pop(checkpoint_hash).blocks:
            assert block.checkpoints is not None
            block.checkpoints.remove(checkpoint_hash)
            if not block.checkpoints:
                assert block.cached_in is not None
                del block.cached_in[block.block_hash]
                block.cached_in = block.checkpoints = None
        self.kv_events.checkpoints.remove(checkpoint_hash)


def _cache(blocks: BlocksByHash, block_hash: bytes, block: Block) -> Block:
    """Cache `block` unless there is one for the hash. Returns the block that is cached for it now."""
    cached = blocks.setdefault(block_hash, block)
    if cached is block and block.cached_in is None:
        block.cached_in, block.block_hash, block.checkpoints = blocks, block_hash, set()
    return cached
