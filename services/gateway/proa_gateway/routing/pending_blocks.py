"""PendingBlocks: what requests under way will leave in their engines' caches, until the engines tell it themselves.

A tree of prompts, in which those that begin alike share a path and a node is a run of blocks up to where prompts part
or end. A block's hash stands for all before it too, so a run is compared by its last block, and where it differs by
bisection: what a request costs here does not grow with its prompt, but for one copy of the part nobody else has.
"""

from collections.abc import Sequence

_NODE_BYTES = 800  # with its dictionaries, and its place in others
_BLOCK_BYTES = 8 + 64  # a pointer, and a hash as the allocator rounds it


class _Node:
    """A run of blocks. Whoever expects one of them expects all, and those of the nodes above."""

    __slots__ = ("blocks", "children", "ending", "holders", "parent", "shares", "start")

    def __init__(self, parent: "_Node | None", start: int, blocks: Sequence[bytes]) -> None:
        self.parent = parent
        self.start = start  # blocks before
        self.blocks = blocks
        self.children: dict[bytes, _Node] = {}  # by the first block
        self.holders = 0  # a bit for each replica that has a share
        self.shares: dict[int, int] = {}  # by bit: children with that replica, and one more where a request ends here
        self.ending = 0  # a bit for each replica with a request that ends here

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    def shared(self, block_hashes: Sequence[bytes]) -> int:
        """How far the prompt goes along, counted from its first block. The node's first block is known to be in it."""
        blocks, start = self.blocks, self.start
        same, other = start, min(start + len(blocks), len(block_hashes)) - 1
        if blocks[other - start] == block_hashes[other]:
            return other + 1
        while other - same > 1:
            middle = (same + other) // 2
            if blocks[middle - start] == block_hashes[middle]:
                same = middle
            else:
                other = middle
        return other


class PendingBlocks:
    """Of replicas by bit. Holds what it is given until that is told or forgotten; the bounds are its owner's."""

    def __init__(self) -> None:
        self._root = _Node(None, 0, ())
        self._ends: dict[bytes, _Node] = {}  # where requests end, by the last block
        self._requests: dict[int, dict[_Node, float]] = {}  # by bit: where they end, when last sent; oldest first
        self._held: dict[int, int] = {}  # by bit: blocks
        self._num_nodes = 0
        self.num_blocks = 0  # distinct ones

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * _BLOCK_BYTES + self._num_nodes * _NODE_BYTES

    def num_expected(self, bit: int) -> int:
        """Blocks that are expected of the replica."""
        return self._held.get(bit, 0)

    def oldest(self, bit: int) -> float | None:
        """When that request was sent; None where nothing is expected of the replica."""
        return next(iter(self._requests.get(bit, {}).values()), None)

    def match(self, block_hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """How many of the blocks, counted from the first, are expected of which replicas at least, as bits."""
        found: list[tuple[int, int]] = []
        node, at = self._root, 0
        while at == node.end and at < len(block_hashes) and (child := node.children.get(block_hashes[at])) is not None:
            node, at = child, child.shared(block_hashes)
            found.append((at, node.holders))
        return found

    def add(self, bit: int, block_hashes: Sequence[bytes], now: float) -> None:
        """A request with these blocks, of which there is one at least, is sent to the replica."""
        node = self._ends.get(block_hashes[-1]) or self._grow(block_hashes)
        requests = self._requests.setdefault(bit, {})
        if requests.pop(node, None) is None:
            self._ends[block_hashes[-1]] = node
            node.ending |= bit
            self._take_share(node, bit)
        requests[node] = now

    def told(self, bit: int, block_hashes: Sequence[bytes]) -> None:
        """The replica's engine holds these: requests that end in one of them are computed, and no more expected."""
        for block_hash in self._ends.keys() & block_hashes if self._requests.get(bit) else ():
            node = self._ends[block_hash]
            if node.ending & bit:
                del self._requests[bit][node]
                self._end(node, bit)

    def forget_oldest(self, bit: int) -> None:
        """Of the replica's requests, of which there is one."""
        requests = self._requests[bit]
        node = next(iter(requests))
        del requests[node]
        self._end(node, bit)

    def forget(self, bit: int) -> None:
        """All that is expected of the replica."""
        for node in self._requests.pop(bit, {}):
            self._end(node, bit)
        self._held.pop(bit, None)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where nodes and requests disagree. For tests."""
        held = dict.fromkeys(self._held, 0)
        num_nodes = num_blocks = 0
        nodes = list(self._root.children.values())
        for node in nodes:  # grows below
            nodes += node.children.values()
            num_nodes, num_blocks = num_nodes + 1, num_blocks + len(node.blocks)
            for bit, share in node.shares.items():
                ends_here = node.ending & bit == bit
                assert ends_here == (node in self._requests[bit])
                assert share == ends_here + sum([child.holders & bit == bit for child in node.children.values()]) > 0
                held[bit] += len(node.blocks)
            assert node.holders == sum(node.shares)
            assert node.holders
            assert (node.ending != 0) == (self._ends.get(node.blocks[-1]) is node)
        assert (num_nodes, num_blocks, held) == (self._num_nodes, self.num_blocks, self._held)

    def _grow(self, block_hashes: Sequence[bytes]) -> _Node:
        """The node that ends with the last block."""
        node, at = self._root, 0
        while at < len(block_hashes):
            child = node.children.get(block_hashes[at])
            if child is None:
                child = node.children[block_hashes[at]] = _Node(node, at, block_hashes[at:])
                self._num_nodes += 1
                self.num_blocks += len(child.blocks)
            at = child.shared(block_hashes)
            node = child if at == child.end else self._split(child, at)
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """A new node for what comes before, under which the given one stays what requests know."""
        assert node.parent is not None
        before, after = node.blocks[: at - node.start], node.blocks[at - node.start :]
        upper = node.parent.children[before[0]] = _Node(node.parent, node.start, before)
        upper.children[after[0]] = node
        upper.holders, upper.shares = node.holders, dict.fromkeys(node.shares, 1)
        node.parent, node.start, node.blocks = upper, at, after
        self._num_nodes += 1
        return upper

    def _take_share(self, node: _Node, bit: int) -> None:
        while node.parent is not None:
            node.shares[bit] = node.shares.get(bit, 0) + 1
            if node.holders & bit:
                return
            node.holders |= bit
            self._held[bit] = self._held.get(bit, 0) + len(node.blocks)
            node = node.parent

    def _end(self, node: _Node, bit: int) -> None:
        """A request of the replica ends here no more. Nodes that no replica shares are gone."""
        node.ending ^= bit
        if not node.ending:
            del self._ends[node.blocks[-1]]
        while node.parent is not None:
            node.shares[bit] -= 1
            if node.shares[bit]:
                return
            del node.shares[bit]
            node.holders ^= bit
            self._held[bit] -= len(node.blocks)
            if not node.holders:
                del node.parent.children[node.blocks[0]]
                self._num_nodes -= 1
                self.num_blocks -= len(node.blocks)
            node = node.parent
