"""KvFollower: keeps the index right about an engine's blocks, by the engine's own events, while its session lasts."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from proa_gateway.routing.index import PrefixIndex
from proa_gateway.types import Hello, KvEvents, KvEventsRefused

RETRY = 1.0  # seconds
SLICE = 1024  # blocks worked off before the event loop gets a turn: about half a millisecond
_log = logging.getLogger(__name__)

Subscribe = Callable[[], AsyncGenerator[KvEvents, None]]


class KvFollower:
    """`follow` is called once a session, and cancelled at its end."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    async def follow(self, address: str, hello: Hello, subscribe: Subscribe) -> None:
        """Subscribes, again wherever the stream breaks or leaves a gap; what the engine held goes with its session."""
        index = self._index
        if not hello.num_cached_blocks:
            return
        index.add(address, hello.model.chain, hello.num_cached_blocks)
        try:
            while True:
                try:
                    await self._apply(address, subscribe())
                except KvEventsRefused as refused:
                    _log.warning("engine %s does not tell what its cache holds: %s", address, refused)
                    index.cannot_tell(address)
                    await asyncio.get_running_loop().create_future()
                await asyncio.sleep(RETRY)
        finally:
            index.remove(address)

    async def _apply(self, address: str, events: AsyncGenerator[KvEvents, None]) -> None:
        """Until the stream's end, or a gap in its sequence."""
        index, due = self._index, None
        async with aclosing(events):
            async for event in events:
                if event.sequence != due and not event.snapshot:
                    _log.warning("engine %s: events %s to %d of its cache are missing", address, due, event.sequence)
                    return
                due = event.sequence + 1
                if event.snapshot:
                    index.void(address)
                for part in _slices(event.removed):
                    index.removed(address, part)
                    await asyncio.sleep(0)
                for part in _slices(event.stored):
                    index.stored(address, part)
                    await asyncio.sleep(0)


def _slices(block_hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [block_hashes[start : start + SLICE] for start in range(0, len(block_hashes), SLICE)]
