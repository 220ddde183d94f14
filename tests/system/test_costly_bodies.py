"""No single request holds up the others: for each field that is a list, a map or a text, a body of 16 MiB."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from support.costly_bodies import Costly, costly_bodies
from support.event_loop import Meter, slowness
from support.gateway import RunningGateway, running_gateway
from support.processes import fake_engine_process

MAX_HOLD = 0.100  # seconds; about twice what the costliest need on the machine of `slowness`
MAX_MEMORY = 300 * 2**20
ATTEMPTS = 12  # other processes take the cache and the memory too
TASKS = ("--pooling-tasks", "POOLING_TASK_EMBED", "POOLING_TASK_CLASSIFY")


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    with fake_engine_process("--max-model-len=8192", *TASKS) as (_, address):
        async with running_gateway(address, enable_runtime_lora_updating=True) as gateway:
            yield gateway


async def send(gateway: RunningGateway, costly: Costly) -> int:
    """The status of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"POST {costly.route} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(costly.body)}\r\n\r\n".encode())
    view = memoryview(costly.body)
    with contextlib.suppress(ConnectionError):  # refused before its end
        for start in range(0, len(view), 65_536):
            writer.write(view[start : start + 65_536])
            await writer.drain()
    status = int((await reader.readline()).split()[1])
    await reader.read()
    writer.close()
    return status


@pytest.mark.timeout(900)
async def test_every_field_is_bounded_in_time_and_memory(gateway: RunningGateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    max_hold, failures = MAX_HOLD * slowness(), []
    for costly in costly_bodies(document):
        for _ in range(ATTEMPTS):
            meter = Meter()
            status = await meter.measure(send(gateway, costly))
            if meter.hold <= max_hold and meter.memory <= MAX_MEMORY and status != 500:
                break
        else:
            failures.append(f"{costly}: {meter.hold * 1000:.0f} ms, {meter.memory / 2**20:.0f} MiB, {status}")
    assert not failures, "\n".join([f"of {max_hold * 1000:.0f} ms, {os.getloadavg()[0]:.1f} busy cores:", *failures])
