"""Apply an engine's KV cache events (`SubscribeKvEvents`) to the prefix index."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from proa.contract import Hello, KvEvents
from proa_gateway.routing.hints import hash_chain
from proa_gateway.routing.index import PrefixIndex

RETRY_DELAY = 1.0  # seconds
BATCH_BLOCKS = 1024
"""Blocks applied before control returns to the event loop: about 0.5 ms."""
_log = logging.getLogger(__name__)

Subscribe = Callable[[], AsyncGenerator[KvEvents, None]]


class KvEventsRefused(Exception):
    """The engine has no KV cache events, for the reason given."""


async def follow_kv_events(index: PrefixIndex, address: str, hello: Hello, subscribe: Subscribe) -> None:
    """Keep the engine in the index until cancelled, then remove it.

    Subscribes again when the stream ends or skips a sequence number. Returns at once if the engine has no prefix cache.
    """
    if not hello.model.prefix_caching:
        return
    model = hello.model
    index.add_replica(address, hash_chain(model), model.num_gpu_blocks, model.checkpoint_rule)
    try:
        while True:
            try:
                await _apply(index, address, subscribe())
            except KvEventsRefused as refused:
                _log.warning("KV events of engine %s are not available: %s", address, refused)
                index.disable_events(address)
                await asyncio.get_running_loop().create_future()  # until cancelled
            await asyncio.sleep(RETRY_DELAY)
    finally:
        index.remove_replica(address)


async def _apply(index: PrefixIndex, address: str, events: AsyncGenerator[KvEvents, None]) -> None:
    """Apply events until the stream ends or a sequence number is missing."""
    expected = None
    async with aclosing(events):
        async for event in events:
            if event.sequence != expected and not event.snapshot:
                _log.warning("KV events of engine %s are missing: %s to %d", address, expected, event.sequence)
                return
            expected = event.sequence + 1
            if event.snapshot:
                index.clear_confirmed(address)
            for batch in _batches(event.removed):
                index.remove_confirmed(address, batch)
                await asyncio.sleep(0)
            for batch in _batches(event.stored):
                index.add_confirmed(address, batch)
                await asyncio.sleep(0)
            for batch in _batches(event.checkpoints_removed):
                index.remove_checkpoints(address, batch)
                await asyncio.sleep(0)
            for batch in _batches(event.checkpoints_stored):
                index.add_checkpoints(address, batch)
                await asyncio.sleep(0)


def _batches(block_hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [block_hashes[start : start + BATCH_BLOCKS] for start in range(0, len(block_hashes), BATCH_BLOCKS)]
