"""What embeddings cost the gateway over HTTP, by encoding, and how long rendering them holds up its event loop.

A fake engine process computes the values, in Python, so only the gateway's own CPU time says something. The turns of
the event loop are measured in this process: rendered in turns as the gateway does, all at once, and in a thread.

    PYTHONPATH=tests python tests/benchmarks/embeddings.py --inputs 64 --dimensions 1024
"""

import argparse
import asyncio
import math
import time
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from typing import Any

import httpx
import psutil

from proa.contract import EngineCoreOutput, FinishReason
from proa_gateway.pooled_output import PooledOutput
from proa_gateway.pooling import values
from support.processes import fake_engine_process, gateway_process

TASK = ("--pooling-tasks", "POOLING_TASK_EMBED")
FORMATS = {"one dimension": "float", "base64": "base64", "float": "float"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=64)
    parser.add_argument("--dimensions", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32, help="of an input")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    measure_requests(arguments)
    outputs = [make_output(index, arguments.dimensions) for index in range(arguments.inputs)]
    for name, wait in RENDERING.items():
        gaps = [asyncio.run(longest_gap(partial(wait, outputs))) for _ in range(arguments.rounds)]
        print(f"rendered {name:12} longest turn of the event loop {1000 * min(gaps):5.1f} ms")


def measure_requests(arguments: argparse.Namespace) -> None:
    inputs = [[1 + index % 300] * arguments.tokens for index in range(arguments.inputs)]
    used: dict[str, list[float]] = {name: [] for name in FORMATS}
    engine_arguments = (*TASK, "--embedding-size", str(arguments.dimensions))
    with fake_engine_process(*engine_arguments) as (_, address), gateway_process(address) as (process, port):
        gateway = psutil.Process(process.pid)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for number in range(arguments.rounds + 1):
                for name, encoding_format in FORMATS.items():
                    dimensions = 1 if name == "one dimension" else arguments.dimensions
                    body = {"input": inputs, "encoding_format": encoding_format, "dimensions": dimensions}
                    before = cpu_seconds(gateway)
                    response = client.post("/v1/embeddings", json=body).raise_for_status()
                    if number:  # the first round warms up
                        used[name].append(1000 * (cpu_seconds(gateway) - before))
                    if number == arguments.rounds:
                        size = len(response.content) / 1000
                        print(f"{name:14} gateway CPU {median(used[name]):5.1f} ms, response {size:7.1f} kB")


def cpu_seconds(process: psutil.Process) -> float:
    """From the scheduler, in nanoseconds: `cpu_times` counts in hundredths of a second."""
    total = 0
    for thread in process.threads():
        with open(f"/proc/{process.pid}/task/{thread.id}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def make_output(seed: int, dimensions: int) -> PooledOutput:
    class Listener:
        def started(self, sequence: Any) -> None: ...

        def ended(self, sequence: Any) -> None: ...

        def failed(self, sequence: Any, error: Exception, *, retryable: bool) -> None: ...

    output = PooledOutput(Listener())
    row = array("f", [math.sin(seed + index) / 32 for index in range(dimensions)]).tobytes()
    output.output(EngineCoreOutput(finish_reason=FinishReason.STOP, pooled=row, num_pooled_rows=1))
    return output


async def render(outputs: list[PooledOutput], turn_values: int = values.TURN_VALUES) -> None:
    values.TURN_VALUES = turn_values
    await values.render_all(outputs, lambda index: b'{"embedding":', partial(values.float_rows, as_matrix=False))


async def render_in_thread(outputs: list[PooledOutput]) -> None:
    await asyncio.to_thread(lambda: asyncio.run(render(outputs, 10**9)))


RENDERING: dict[str, Callable[[list[PooledOutput]], Awaitable[None]]] = {
    "in turns": render,
    "at once": partial(render, turn_values=10**9),
    "in a thread": render_in_thread,
}


async def longest_gap(work: Callable[[], Awaitable[None]]) -> float:
    """The longest time between two turns of another task, in seconds."""
    gaps: list[float] = []
    ended = False

    async def take_turns() -> None:
        last = time.perf_counter()
        while not ended:
            await asyncio.sleep(0)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    task = asyncio.create_task(take_turns())
    await asyncio.sleep(0.005)
    gaps.clear()
    await work()
    await asyncio.sleep(0)
    ended = True
    await task
    return max(gaps)


if __name__ == "__main__":
    main()
