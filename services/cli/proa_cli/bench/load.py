"""Sends the requests of a benchmark at their times, with a limit at once, until all have ended or time is up."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from proa_cli.bench.client import Call, Sample
from proa_cli.bench.metrics import Section

Send = Callable[[Call], Awaitable[Sample]]


@dataclass(frozen=True, slots=True)
class Load:
    """`times`: of each call, in seconds after the start, ascending. After `seconds` what still runs is abandoned."""

    calls: Sequence[Call]
    times: Sequence[float]
    max_concurrency: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Elapsed:
    """`cpu`: cores that this process used."""

    seconds: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Measured:
    """`samples`: of the calls that ended, in their order. `unfinished`: calls that did not. `sections`: what this kind
    of load shows beside the figures of all."""

    samples: Sequence[Sample]
    unfinished: int
    elapsed: Elapsed
    sections: Sequence[Section] = ()


async def run_load(load: Load, send: Send, ended: Callable[[Sample], None], stop: asyncio.Event) -> Measured:
    """Run until all calls have ended, until `load.seconds` are over or `stop` is set. `ended` is called with each
    sample at once."""
    samples: dict[int, Sample] = {}
    slots: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if load.max_concurrency is not None:
        slots = asyncio.Semaphore(load.max_concurrency)

    async def run(index: int) -> None:
        arrived = time.monotonic()
        async with slots:
            queued = time.monotonic() - arrived
            sample = await send(load.calls[index])
            sample.queued = queued
            samples[index] = sample
            ended(sample)

    async def run_all() -> None:
        started = time.monotonic()
        async with asyncio.TaskGroup() as running:
            for index, at in enumerate(load.times):
                if (delay := started + at - time.monotonic()) > 0:
                    await asyncio.sleep(delay)
                running.create_task(run(index))

    elapsed = await run_until(run_all(), load.seconds, stop)
    in_order = [samples[index] for index in sorted(samples)]
    return Measured(in_order, len(load.calls) - len(in_order), elapsed)


async def run_until(work: Coroutine[Any, Any, None], seconds: float, stop: asyncio.Event) -> Elapsed:
    """Run `work` until it has ended, until `seconds` are over or `stop` is set; then it is cancelled. Raises what it
    raises."""
    started, cpu = time.monotonic(), time.process_time()
    tasks = [asyncio.create_task(work), asyncio.create_task(stop.wait())]
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    return Elapsed(seconds, cpu / max(seconds, 1e-9))


@contextlib.contextmanager
def stopped_by(*signals: int) -> Iterator[asyncio.Event]:
    """An event that these signals set in place of what they do."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
