"""AudioMemory: the bytes of audio that unfinished requests hold."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from proa_gateway.audio.config import DECODING_BYTES
from proa_gateway.errors import Overloaded


class AudioMemory:
    """Counts files, from their first bytes to the end of their requests, what decoding them takes, and samples, until
    they are no longer needed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._turn = asyncio.Lock()  # of those that wait for room, first come, first served
        self._released = asyncio.Event()
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Of a file that arrives: they leave room to decode one of them. Raises `Overloaded` if there is none."""
        if not self._has_room(num_bytes + DECODING_BYTES):
            raise self._error()
        self.num_bytes += num_bytes

    async def wait_and_hold(self, num_bytes: int, seconds: float) -> None:
        """Raises `Overloaded` if there is no room after `seconds`."""
        try:
            async with asyncio.timeout(seconds), self._turn:
                while not self._has_room(num_bytes):
                    self._released.clear()
                    await self._released.wait()
                self.num_bytes += num_bytes
        except TimeoutError:
            raise self._error() from None

    def release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._released.set()

    @contextmanager
    def request(self) -> Iterator["HeldSamples"]:
        """What one request holds; released on exit."""
        held = HeldSamples(self)
        try:
            yield held
        finally:
            held.release(held.num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return self.num_bytes + num_bytes <= self._max_bytes

    def _error(self) -> Overloaded:
        return Overloaded(f"The server is at its limit of {self._max_bytes} bytes of audio.", limit="audios")


class HeldSamples:
    """The bytes of samples that one request holds."""

    def __init__(self, memory: AudioMemory) -> None:
        self._memory = memory
        self._is_reserved = False
        self.num_bytes = 0

    @asynccontextmanager
    async def reserved(self, num_bytes: int, seconds: float) -> AsyncIterator[None]:
        """All that decoding a file takes at a time, its unfinished windows included: a file that has begun never waits
        for another one's memory. What is held on exit stays so. Raises `Overloaded` if there is no room after
        `seconds`."""
        held_before = self.num_bytes
        await self._memory.wait_and_hold(num_bytes, seconds)
        self._is_reserved = True
        try:
            yield
        finally:
            self._is_reserved = False
            self._memory.release(num_bytes - (self.num_bytes - held_before))

    def add(self, num_bytes: int) -> None:
        """Of the room that is reserved."""
        assert self._is_reserved
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        if not self._is_reserved:
            self._memory.release(num_bytes)
