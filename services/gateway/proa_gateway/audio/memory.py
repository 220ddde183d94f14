"""AudioMemory: the bytes of audio that unfinished requests hold."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from proa_gateway.audio.config import DECODING_BYTES
from proa_gateway.errors import Overloaded


class AudioMemory:
    """Counts files, from their first bytes to the end of their requests, the processes that decode them, and samples,
    until they are no longer needed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._most_decoding = max_bytes - max_bytes // 4  # with what decoding takes; the rest is for files that arrive
        self._num_decoding = 0  # files
        self._turn = asyncio.Lock()  # of those that wait to begin, first come, first served
        self._waiting: set[asyncio.Event] = set()  # set when bytes are released
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Of a file that arrives: they leave room to decode one of them. Raises `Overloaded` if there is none."""
        if self.num_bytes + num_bytes + DECODING_BYTES > self._max_bytes:
            raise self._error()
        self.num_bytes += num_bytes

    @asynccontextmanager
    async def decoding(self, num_bytes: int, seconds: float) -> AsyncIterator[None]:
        """Hold bytes for a file that is decoded in this context, and not release them. One file can always be decoded.
        Raises `Overloaded` if there is no room after `seconds`."""

        def has_room() -> bool:
            limit = self._most_decoding if self._num_decoding else self._max_bytes
            return self.num_bytes + num_bytes <= limit

        try:
            async with asyncio.timeout(seconds), self._turn:
                await self._wait_until(has_room)
                self.num_bytes += num_bytes
                self._num_decoding += 1
        except TimeoutError:
            raise self._error() from None
        try:
            yield
        finally:
            self._num_decoding -= 1

    async def wait_for_spare(self, num_bytes: Callable[[], int]) -> None:
        """Wait until there is room for so many bytes, which may become fewer, and no file waits to be decoded."""

        def has_room() -> bool:
            more = num_bytes()
            return not more or (not self._turn.locked() and self.num_bytes + more <= self._most_decoding)

        await self._wait_until(has_room)

    def release(self, num_bytes: int) -> None:
        """Negative: hold bytes for which there is room."""
        self.num_bytes -= num_bytes
        for event in self._waiting:
            event.set()

    @contextmanager
    def request(self) -> Iterator["HeldSamples"]:
        """What one request holds; released on exit."""
        held = HeldSamples(self)
        try:
            yield held
        finally:
            held.release(held.num_bytes)

    async def _wait_until(self, is_true: Callable[[], bool]) -> None:
        released = asyncio.Event()
        self._waiting.add(released)
        try:
            while not is_true():
                released.clear()
                await released.wait()
        finally:
            self._waiting.remove(released)

    def _error(self) -> Overloaded:
        return Overloaded(f"The server is at its limit of {self._max_bytes} bytes of audio.", limit="audios")


class HeldSamples:
    """The bytes of samples that one request holds."""

    def __init__(self, memory: AudioMemory) -> None:
        self._memory = memory
        self._reserved = 0  # of `num_bytes`, those that are counted from the beginning
        self.num_bytes = 0

    @asynccontextmanager
    async def decoding(self, num_bytes: int, window_bytes: int, seconds: float) -> AsyncIterator[None]:
        """Hold the bytes that decoding a file takes until exit, and reserve one window: so files that have begun never
        wait for each other. Raises `Overloaded` if there is no room after `seconds`."""
        async with self._memory.decoding(num_bytes + window_bytes, seconds):
            self._reserved = self.num_bytes + window_bytes
            try:
                yield
            finally:
                num_unused, self._reserved = max(self._reserved - self.num_bytes, 0), 0
                self._memory.release(num_bytes + num_unused)

    async def take(self, num_bytes: int) -> None:
        """Of a window; beside unfinished ones of the request, only if there is enough memory."""
        await self._memory.wait_for_spare(lambda: self._needed(num_bytes))
        self.release(-num_bytes)

    def release(self, num_bytes: int) -> None:
        needed = self._needed(-num_bytes)
        self.num_bytes -= num_bytes
        self._memory.release(-needed)

    def _needed(self, num_bytes: int) -> int:
        """Bytes of memory for so many more bytes of samples."""
        return max(self._reserved, self.num_bytes + num_bytes) - max(self._reserved, self.num_bytes)
