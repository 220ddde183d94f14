"""How long a piece of work computes without giving the event loop a turn, and how much memory it takes."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import orjson

T = TypeVar("T")

_STATUS = Path("/proc/self/status")


class Meter:
    """`hold`: the longest time in seconds that the event loop's thread computed between two turns of a timer; time that
    other processes have the core does not count. `memory`: the most bytes beside those at the start."""

    def __init__(self) -> None:
        self.hold = 0.0
        self.memory = 0

    async def measure(self, work: Awaitable[T]) -> T:
        """The work's result."""
        gc.collect()
        before = _reset_peak()
        beat = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        try:
            result = await work
            await asyncio.sleep(0.002)
        finally:
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beat
        self.memory = _bytes("VmHWM") - before
        return result

    async def _beat(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.hold, last = max(self.hold, now - last), now


def slowness() -> float:
    """How many times as long this machine needs as the one on which 16 MiB of JSON take 30 ms; at least 1."""
    body = b'"' + b"a" * (16 * 2**20) + b'"'
    times = []
    for _ in range(5):
        started = time.perf_counter()
        orjson.loads(body)
        times.append(time.perf_counter() - started)
    return max(1.0, min(times) / 0.030)


def _reset_peak() -> int:
    """Reset VmHWM; return VmRSS in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _bytes("VmRSS")


def _bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
