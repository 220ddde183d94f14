"""FakePrefixCache: the prefix cache of an engine, also of one whose model has sliding windows or recurrent states.

Only hashes: which blocks and checkpoints there are, where hits end, and the messages that subscribers get.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from proa.blocks import checkpoint_positions, hash_blocks
from proa.engine.v1 import service_pb2

Message = service_pb2.SubscribeKvEventsResponse


@dataclass(eq=False)
class _Subscriber:
    messages: "asyncio.Queue[Message | None]" = field(default_factory=asyncio.Queue)
    sequence: int = 0

    def send(self, **fields: Any) -> None:
        self.sequence += 1
        self.messages.put_nowait(Message(sequence=self.sequence, **fields))


class FakePrefixCache:
    """Blocks and checkpoints are named by hash, in the order in which they were stored. Without a `rule` there are no
    checkpoints, and hits end at any block."""

    def __init__(self, rule: service_pb2.CheckpointRule | None, root: bytes, block_size: int = 16) -> None:
        self.rule = rule
        self.blocks: dict[bytes, None] = {}
        self.checkpoints: dict[bytes, None] = {}
        self._root = root
        self._block_size = block_size
        self._subscribers: list[_Subscriber] = []

    def subscribe(self) -> "asyncio.Queue[Message | None]":
        """A queue of messages, a snapshot first."""
        subscriber = _Subscriber()
        subscriber.send(snapshot=True, stored=b"".join(self.blocks), checkpoints_stored=b"".join(self.checkpoints))
        self._subscribers.append(subscriber)
        return subscriber.messages

    def hit(self, token_ids: Sequence[int], extra_keys: Sequence[bytes | str] = ()) -> tuple[int, int]:
        """How many tokens a request with these takes from the cache, and how many are in full blocks known to it."""
        hashes = self.hashes(token_ids, extra_keys)[: (len(token_ids) - 1) // self._block_size]
        known = self.count(hashes)
        if self.rule is None:
            return known * self._block_size, known * self._block_size
        hit = next((end for end in range(known, 0, -1) if hashes[end - 1] in self.checkpoints), 0)
        return hit * self._block_size, known * self._block_size

    def compute(self, token_ids: Sequence[int], extra_keys: Sequence[bytes | str] = ()) -> int:
        """A request joins and computes its prompt. Returns the hit, in tokens."""
        hit, known = self.hit(token_ids, extra_keys)
        hashes = self.hashes(token_ids, extra_keys)
        if self.rule is None:
            self.store(hashes)
            return hit
        positions = checkpoint_positions(
            len(token_ids), hit, known, self.rule.interval, self.rule.min_junction, self._block_size
        )
        self.store(hashes, [hashes[position // self._block_size - 1] for position in positions])
        return hit

    def finish(self, token_ids: Sequence[int], extra_keys: Sequence[bytes | str] = ()) -> None:
        """A request ends with these computed tokens, prompt and output."""
        hashes = self.hashes(token_ids, extra_keys)
        self.store(hashes, hashes[-1:] if self.rule is not None else ())

    def count(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are in the cache."""
        return next((number for number, name in enumerate(hashes) if name not in self.blocks), len(hashes))

    def evict(self, blocks: Iterable[bytes] = (), checkpoints: Iterable[bytes] = ()) -> None:
        removed = [name for name in blocks if name in self.blocks]
        checkpoints_removed = [name for name in checkpoints if name in self.checkpoints]
        for name in removed:
            del self.blocks[name]
        for name in checkpoints_removed:
            del self.checkpoints[name]
        self._send(removed=b"".join(removed), checkpoints_removed=b"".join(checkpoints_removed))

    def hashes(self, token_ids: Sequence[int], extra_keys: Sequence[bytes | str]) -> list[bytes]:
        return hash_blocks(self._root, token_ids, self._block_size, extra_keys)

    def store(self, blocks: Iterable[bytes], checkpoints: Iterable[bytes] = ()) -> None:
        stored = [name for name in blocks if name not in self.blocks]
        checkpoints_stored = [name for name in checkpoints if name not in self.checkpoints]
        self.blocks |= dict.fromkeys(stored)
        self.checkpoints |= dict.fromkeys(checkpoints_stored)
        self._send(stored=b"".join(stored), checkpoints_stored=b"".join(checkpoints_stored))

    def _send(self, **columns: bytes) -> None:
        if any(columns.values()):
            for subscriber in self._subscribers:
                subscriber.send(**columns)
