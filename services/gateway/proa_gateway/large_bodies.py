"""LargeBodies: passes large request bodies on one at a time, and knows how far behind that is."""

import asyncio
import time
from collections import deque
from collections.abc import Callable


class LargeBodies:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()  # first come, first served
        self._waiting: deque[float] = deque()  # when each arrived
        self._idle = asyncio.Event()
        self._idle.set()

    async def turn(self) -> None:
        """Wait for the bodies that came earlier, and then for one turn of the event loop."""
        arrived = self._clock()
        self._waiting.append(arrived)
        self._idle.clear()
        try:
            async with self._lock:
                await asyncio.sleep(0)
        finally:
            self._waiting.remove(arrived)
            if not self._waiting:
                self._idle.set()

    async def none_waits(self) -> None:
        """Wait until all bodies are passed on."""
        await self._idle.wait()

    def delay(self) -> float:
        """Seconds for which the oldest body that is not passed on yet has waited; 0: none waits."""
        return self._clock() - self._waiting[0] if self._waiting else 0.0
