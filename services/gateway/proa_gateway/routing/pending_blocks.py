"""PendingBlocks: the blocks that requests in flight will leave in their engines' prefix caches.

A radix tree of prompts, like SGLang's RadixAttention: a node is a run of blocks that prompts share up to where they
differ or end. A block's hash covers all blocks before it, so a run is compared by its last block, and by bisection if
that differs. The cost of a request does not grow with its prompt, except for one copy of its unshared part.
"""

from collections.abc import Sequence

_NODE_BYTES = 800  # with its dictionaries and its entries in others
_BLOCK_BYTES = 8 + 64  # a pointer, and a hash rounded up by the allocator


class _Node:
    """A run of blocks. A replica with one of them pending has all of them pending, and those of the nodes above."""

    __slots__ = ("blocks", "children", "end_replicas", "parent", "ref_counts", "replicas", "start")

    def __init__(self, parent: "_Node | None", start: int, blocks: Sequence[bytes]) -> None:
        self.parent = parent
        self.start = start  # number of blocks in the nodes above
        self.blocks = blocks
        self.children: dict[bytes, _Node] = {}  # by their first block
        self.replicas = 0  # bitmap of the replicas in `ref_counts`
        self.ref_counts: dict[int, int] = {}  # by replica bit: its children here, plus 1 if a request ends here
        self.end_replicas = 0  # bitmap of the replicas with a request that ends here

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    def common_length(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the prompt are on the path to this node and in it, at least `start` + 1."""
        blocks, start = self.blocks, self.start
        same, different = start, min(start + len(blocks), len(block_hashes)) - 1
        if blocks[different - start] == block_hashes[different]:
            return different + 1
        while different - same > 1:
            middle = (same + different) // 2
            if blocks[middle - start] == block_hashes[middle]:
                same = middle
            else:
                different = middle
        return different


class PendingBlocks:
    """Replicas are named by their bit. Blocks stay until they are confirmed or removed; the owner bounds them."""

    def __init__(self) -> None:
        self._root = _Node(None, 0, ())
        self._ends: dict[bytes, _Node] = {}  # nodes where requests end, by last block
        self._requests: dict[int, dict[_Node, float]] = {}  # by bit: end node -> time last sent, oldest first
        self._num_pending: dict[int, int] = {}  # by bit: blocks
        self._num_nodes = 0  # without `_root`
        self.num_blocks = 0  # distinct ones

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * _BLOCK_BYTES + self._num_nodes * _NODE_BYTES

    def num_pending(self, bit: int) -> int:
        """Return the number of the replica's pending blocks."""
        return self._num_pending.get(bit, 0)

    def oldest(self, bit: int) -> float | None:
        """Return when the replica's oldest pending request was sent, None if it has none."""
        return next(iter(self._requests.get(bit, {}).values()), None)

    def match(self, block_hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return (length, bitmap) pairs: which replicas have at least how many leading blocks of the prompt pending."""
        found: list[tuple[int, int]] = []
        node, length = self._root, 0
        while (
            length == node.end
            and length < len(block_hashes)
            and (child := node.children.get(block_hashes[length])) is not None
        ):
            node, length = child, child.common_length(block_hashes)
            found.append((length, node.replicas))
        return found

    def add(self, bit: int, block_hashes: Sequence[bytes], now: float) -> None:
        """A request with these blocks, at least one, is sent to the replica."""
        node = self._ends.get(block_hashes[-1]) or self._insert(block_hashes)
        requests = self._requests.setdefault(bit, {})
        if requests.pop(node, None) is None:
            self._ends[block_hashes[-1]] = node
            node.end_replicas |= bit
            self._add_ref(node, bit)
        requests[node] = now

    def confirm(self, bit: int, block_hashes: Sequence[bytes]) -> None:
        """The replica has these blocks: requests that end with one of them are computed, so no longer pending."""
        for block_hash in self._ends.keys() & block_hashes if self._requests.get(bit) else ():
            node = self._ends[block_hash]
            if node.end_replicas & bit:
                del self._requests[bit][node]
                self._remove_end(node, bit)

    def remove_oldest(self, bit: int) -> None:
        """Remove the replica's oldest request; it must have one."""
        requests = self._requests[bit]
        node = next(iter(requests))
        del requests[node]
        self._remove_end(node, bit)

    def remove_replica(self, bit: int) -> None:
        """Remove all requests of the replica."""
        for node in self._requests.pop(bit, {}):
            self._remove_end(node, bit)
        self._num_pending.pop(bit, None)

    def check_integrity(self) -> None:
        """For tests. Raises `AssertionError` if nodes and requests disagree."""
        num_pending = dict.fromkeys(self._num_pending, 0)
        num_nodes = num_blocks = 0
        nodes = list(self._root.children.values())
        for node in nodes:  # grows below
            nodes += node.children.values()
            num_nodes, num_blocks = num_nodes + 1, num_blocks + len(node.blocks)
            for bit, ref_count in node.ref_counts.items():
                ends_here = node.end_replicas & bit == bit
                assert ends_here == (node in self._requests[bit])
                num_children = sum([child.replicas & bit == bit for child in node.children.values()])
                assert ref_count == ends_here + num_children > 0
                num_pending[bit] += len(node.blocks)
            assert node.replicas == sum(node.ref_counts)
            assert node.replicas
            assert (node.end_replicas != 0) == (self._ends.get(node.blocks[-1]) is node)
        assert (num_nodes, num_blocks, num_pending) == (self._num_nodes, self.num_blocks, self._num_pending)

    def _insert(self, block_hashes: Sequence[bytes]) -> _Node:
        """Return the node that ends with the last block, after adding or splitting nodes as needed."""
        node, length = self._root, 0
        while length < len(block_hashes):
            child = node.children.get(block_hashes[length])
            if child is None:
                child = node.children[block_hashes[length]] = _Node(node, length, block_hashes[length:])
                self._num_nodes += 1
                self.num_blocks += len(child.blocks)
            length = child.common_length(block_hashes)
            node = child if length == child.end else self._split(child, length)
        return node

    def _split(self, node: _Node, length: int) -> _Node:
        """Split before block number `length`; return the new upper node. `node` becomes the lower one, so that requests
        that end in it stay valid."""
        assert node.parent is not None
        before, after = node.blocks[: length - node.start], node.blocks[length - node.start :]
        upper = node.parent.children[before[0]] = _Node(node.parent, node.start, before)
        upper.children[after[0]] = node
        upper.replicas, upper.ref_counts = node.replicas, dict.fromkeys(node.ref_counts, 1)
        node.parent, node.start, node.blocks = upper, length, after
        self._num_nodes += 1
        return upper

    def _add_ref(self, node: _Node, bit: int) -> None:
        """Count a reference of the replica to the node and, if it is its first, to the nodes above."""
        while node.parent is not None:
            node.ref_counts[bit] = node.ref_counts.get(bit, 0) + 1
            if node.replicas & bit:
                return
            node.replicas |= bit
            self._num_pending[bit] = self._num_pending.get(bit, 0) + len(node.blocks)
            node = node.parent

    def _remove_end(self, node: _Node, bit: int) -> None:
        """Remove the end of a replica's request, its references, and nodes without references."""
        node.end_replicas ^= bit
        if not node.end_replicas:
            del self._ends[node.blocks[-1]]
        while node.parent is not None:
            node.ref_counts[bit] -= 1
            if node.ref_counts[bit]:
                return
            del node.ref_counts[bit]
            node.replicas ^= bit
            self._num_pending[bit] -= len(node.blocks)
            if not node.replicas:
                del node.parent.children[node.blocks[0]]
                self._num_nodes -= 1
                self.num_blocks -= len(node.blocks)
            node = node.parent
