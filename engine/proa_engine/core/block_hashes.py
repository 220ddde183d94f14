"""BlockHashes: hashes of requests' blocks, computed on demand."""

from collections.abc import Callable, Sequence

from proa_engine.core.request import Request

# (hash of the block before, this block's token ids, extra keys) -> hash of this block
BlockHashFunction = Callable[[bytes, Sequence[int], Sequence[bytes | str]], bytes]


class BlockHashes:
    """`root` is the parent hash of every sequence's first block."""

    def __init__(self, hash_block: BlockHashFunction, root: bytes, block_size: int) -> None:
        self._hash_block = hash_block
        self._root = root
        self._block_size = block_size

    def of(self, request: Request, index: int) -> bytes:
        """Hash of the request's block `index`, whose tokens are known and whose earlier blocks are hashed."""
        hashes = request.block_hashes
        if index == len(hashes):
            start, end = index * self._block_size, (index + 1) * self._block_size
            parent = hashes[-1] if hashes else self._root
            keys = request.images.extra_keys(request.extra_keys, start, end)
            hashes.append(self._hash_block(parent, request.token_ids[start:end], keys))
        return hashes[index]
