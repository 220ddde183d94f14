"""Failover of fifty streams: their output is the same as without the failure.

Two engines with the built-in model, as processes of their own; a gateway before both. The CPU's arithmetic does not
depend on the batch, so the tokens must be exactly those of an undisturbed run.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import httpx
import pytest

from proa_gateway.config import Deadlines
from support.exact_streams import NUM_STREAMS, Answer, Replicas, read_stream, resumed
from support.gateway import RunningGateway, running_gateway, until

DRAWN_SEED = 0x0DDB1A5E5BAD5EED  # what the gateway draws for requests without a seed


class Streams:
    """Fifty concurrent streams. `num_events` counts the events received, by stream."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.num_events = [0] * NUM_STREAMS

    async def run(self) -> list[Answer]:
        return list(await asyncio.gather(*(self._stream(index) for index in range(NUM_STREAMS))))

    async def advance(self, count: int) -> None:
        """Wait until every unfinished stream has received `count` more events."""
        wanted = [num_events + count for num_events in self.num_events]
        await until(lambda: all(now >= then for now, then in zip(self.num_events, wanted, strict=True)), 60)

    async def _stream(self, index: int) -> Answer:
        answer = Answer()

        def count() -> None:
            self.num_events[index] += 1

        await read_stream(self._http, index, answer, count)
        self.num_events[index] = 1_000_000
        return answer


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(stack)


@pytest.fixture
async def gateway(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningGateway]:
    monkeypatch.setattr("proa_gateway.serving.generation_request.secrets.randbits", lambda bits: DRAWN_SEED)
    async with running_gateway(*replicas.addresses, ready=False, deadlines=Deadlines(failover=60.0)) as gateway:
        await until(lambda: len(usable(gateway)) == 2, 60)
        yield gateway


def usable(gateway: RunningGateway) -> list[str]:
    return [engine.address for engine in gateway.gateway.pool.engines if engine.usable]


def count_resumed(gateway: RunningGateway) -> float:
    return resumed(gateway.gateway.metrics.render().decode())


@pytest.fixture(scope="module")
def remembered() -> list[Answer]:
    return []


@pytest.fixture
async def undisturbed(gateway: RunningGateway, remembered: list[Answer]) -> list[Answer]:
    """The output of every stream without a failure."""
    if not remembered:
        remembered += await Streams(gateway.http).run()
    return remembered


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_streams_of_a_stopped_engine_end_with_the_same_output(
    number: signal.Signals, gateway: RunningGateway, replicas: Replicas, undisturbed: list[Answer]
) -> None:
    streams = Streams(gateway.http)
    running = asyncio.create_task(streams.run())
    await streams.advance(3)
    replicas.processes[0].send_signal(number)
    assert await running == undisturbed
    assert count_resumed(gateway) > 5
    replicas.processes[0].wait()
    replicas.start(0)


async def test_streams_survive_the_loss_of_both_engines_if_one_is_restarted(
    gateway: RunningGateway, replicas: Replicas, undisturbed: list[Answer]
) -> None:
    streams = Streams(gateway.http)
    running = asyncio.create_task(streams.run())
    await streams.advance(3)
    replicas.processes[0].kill()
    await until(lambda: count_resumed(gateway) > 5, 60)
    before = count_resumed(gateway)
    replicas.processes[1].kill()
    restarting = asyncio.create_task(asyncio.to_thread(replicas.start, 0))
    assert await running == undisturbed
    assert count_resumed(gateway) - before > 5
    await restarting
