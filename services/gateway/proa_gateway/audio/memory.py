"""AudioMemory: the bytes of audio that unfinished requests hold."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from proa_gateway.errors import Overloaded


class AudioMemory:
    """Counts files, from their first bytes to the end of their requests, and samples, until they are no longer
    needed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._turn = asyncio.Lock()  # of those that wait for room, first come, first served
        self._released = asyncio.Event()
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Raises `Overloaded` if there is no room."""
        if not self._has_room(num_bytes):
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
        self.num_bytes = 0

    async def wait_and_hold(self, num_bytes: int, seconds: float) -> None:
        """Raises `Overloaded` if there is no room after `seconds`."""
        await self._memory.wait_and_hold(num_bytes, seconds)
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._memory.release(num_bytes)
        self.num_bytes -= num_bytes
