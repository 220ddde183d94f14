"""Chaos run: kill and restart engines and gateways under load, compare every answer with the undisturbed one.

Two engines with the built-in model and two gateways, as processes. Clients stream requests of 50 kinds. One process at
a time is killed (SIGKILL), stopped (SIGTERM) or frozen (SIGSTOP), and started again. A stream whose engine is lost must
have the same tokens, texts and log probabilities as without the loss. A stream whose gateway is killed is cut; the part
received must be the beginning of its answer. Prints a line for each fault. Exits with 1 after a wrong answer, or an
error of a stream whose gateway was not killed.

    PYTHONPATH=tests python -m benchmarks.http.chaos --minutes 60 --clients 16
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import httpx

from support.exact_streams import NUM_STREAMS, Answer, Replicas, is_beginning, read_stream, resumed
from support.gateway import until
from support.processes import free_port, gateway_process
from support.scrape import Scrape

NUM_GATEWAYS = 2
FROZEN_SECONDS = 15.0  # longer than a gateway's heartbeat
_ANSWER_SECONDS = 300.0  # for the answers between two faults
_SESSION_SECONDS = 60.0  # in which a gateway connects to an engine that has loaded its model


@dataclass(frozen=True, slots=True)
class Fault:
    """`after`: answers that end before it."""

    target: Literal["engine", "gateway"]
    which: int
    signal: signal.Signals
    after: int


@dataclass(slots=True)
class Tally:
    """Answers. `cut`: streams whose gateway was killed. `resumed`: sequences that another engine continued."""

    exact: int = 0
    cut: int = 0
    resumed: float = 0.0
    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def num_ended(self) -> int:
        return self.exact + self.cut + len(self.wrong)


class Gateways:
    """Gateways at fixed ports. `num_killed` counts, by gateway, so that a stream knows whether its own was."""

    def __init__(self, stack: ExitStack, engines: list[str]) -> None:
        self._stack = stack
        self._arguments = (engines[0], *(f"--engine={address}" for address in engines[1:]))
        self.ports = [free_port() for _ in range(NUM_GATEWAYS)]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.num_killed = [0] * NUM_GATEWAYS
        for which in range(NUM_GATEWAYS):
            self.start(which)

    def start(self, which: int) -> None:
        gateway = gateway_process(*self._arguments, port=self.ports[which])
        self.processes[which], _ = self._stack.enter_context(gateway)

    def kill(self, which: int) -> None:
        self.num_killed[which] += 1
        self.processes[which].kill()
        self.processes.pop(which).wait()


class Chaos:
    """One run. `https`: a client of each gateway."""

    def __init__(self, replicas: Replicas, gateways: Gateways, https: Sequence[httpx.AsyncClient]) -> None:
        self.tally = Tally()
        self._replicas = replicas
        self._gateways = gateways
        self._https = https
        self._undisturbed: list[Answer] = []
        self._is_over = False

    async def run(self, faults: Iterable[Fault], num_clients: int, seed: int = 0) -> Tally:
        """Serve `num_clients` until the last of the faults is over."""
        self._undisturbed = await asyncio.gather(*(self._undisturbed_answer(index) for index in range(NUM_STREAMS)))
        async with asyncio.TaskGroup() as clients:
            for number in range(num_clients):
                clients.create_task(self._client(random.Random(f"{seed} {number}")))
            try:
                for fault in faults:
                    await self._until_ended(self.tally.num_ended + fault.after)
                    await self._strike(fault)
                await self._until_ended(self.tally.num_ended + num_clients)
            finally:
                self._is_over = True
        for which in range(NUM_GATEWAYS):
            self.tally.resumed += resumed(await self._page(which))
        return self.tally

    async def _undisturbed_answer(self, index: int) -> Answer:
        answer = Answer()
        await read_stream(self._https[0], index, answer, seed=index)
        return answer

    async def _client(self, chance: random.Random) -> None:
        while not self._is_over:
            which = chance.choice(list(self._gateways.processes))
            await self._ask(which, chance.randrange(NUM_STREAMS))

    async def _ask(self, which: int, index: int) -> None:
        tally, num_killed, answer = self.tally, self._gateways.num_killed[which], Answer()
        begun = time.strftime("%H:%M:%S")
        try:
            await read_stream(self._https[which], index, answer, seed=index)
        except (httpx.HTTPError, AssertionError) as error:
            was_killed = self._gateways.num_killed[which] > num_killed and isinstance(error, httpx.TransportError)
            if was_killed and is_beginning(answer, self._undisturbed[index]):
                tally.cut += 1
            else:
                tally.wrong.append(f"request {index} of {begun}: {type(error).__name__}: {error}, after {answer}")
        else:
            if answer == self._undisturbed[index]:
                tally.exact += 1
            else:
                tally.wrong.append(f"request {index} of {begun}: {answer}, undisturbed: {self._undisturbed[index]}")

    async def _strike(self, fault: Fault) -> None:
        """Kill, stop or freeze a process, and start it again. Return when both gateways use all engines."""
        name = f"{fault.target} {fault.signal.name}"
        if fault.target == "gateway":
            self.tally.resumed += resumed(await self._page(fault.which))
            self._gateways.kill(fault.which)
            await asyncio.to_thread(self._gateways.start, fault.which)
        else:
            process = self._replicas.processes[fault.which]
            process.send_signal(fault.signal)
            if fault.signal == signal.SIGSTOP:
                await asyncio.sleep(FROZEN_SECONDS)
                process.kill()
            await asyncio.to_thread(process.wait)
            await asyncio.to_thread(self._replicas.start, fault.which)
        await self._until_connected()
        self.tally.faults[name] += 1

    async def _until_connected(self) -> None:
        async with asyncio.timeout(_SESSION_SECONDS):
            for which in range(NUM_GATEWAYS):
                while True:
                    if _engines(await self._page(which)).issuperset(self._replicas.addresses):
                        break
                    await asyncio.sleep(0.1)

    async def _until_ended(self, count: int) -> None:
        await until(lambda: self.tally.num_ended >= count, _ANSWER_SECONDS)

    async def _page(self, which: int) -> str:
        response = await self._https[which].get("/metrics")
        assert response.status_code == 200
        return response.text


def _engines(page: str) -> set[str]:
    """The engines with which the gateway has sessions."""
    return {dict(labels)["engine"] for name, labels in Scrape(page).samples if name == "vllm:num_requests_running"}


@asynccontextmanager
async def prepared() -> AsyncIterator[Chaos]:
    """Engines, gateways and clients, ready for a run."""
    async with AsyncExitStack() as stack:
        processes = ExitStack()
        stack.push_async_callback(asyncio.to_thread, processes.close)
        replicas = await asyncio.to_thread(Replicas, processes)
        gateways = await asyncio.to_thread(Gateways, processes, replicas.addresses)
        urls = [f"http://127.0.0.1:{port}" for port in gateways.ports]
        yield Chaos(
            replicas, gateways, [await stack.enter_async_context(httpx.AsyncClient(base_url=url)) for url in urls]
        )


def random_faults(seconds: float, seed: int, tally: Tally) -> Iterator[Fault]:
    """Faults until the time is over. Prints the tally before each."""
    chance, start = random.Random(seed), time.monotonic()
    kinds = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
    print("| minute | faults | exact | cut with their gateway | wrong |")
    print("|---:" * 5 + "|", flush=True)
    while (passed := time.monotonic() - start) < seconds:
        counts = (tally.faults.total(), tally.exact, tally.cut, len(tally.wrong))
        print(f"| {passed / 60:.1f} | {' | '.join(map(str, counts))} |", flush=True)
        is_gateway = chance.random() < 0.3
        yield Fault(
            "gateway" if is_gateway else "engine",
            chance.randrange(2),
            signal.SIGKILL if is_gateway else chance.choice(kinds),
            after=chance.randrange(5, 60),
        )


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the faults and the order of requests (default: 0)")
    arguments = parser.parse_args()
    async with prepared() as chaos:
        faults = random_faults(60 * arguments.minutes, arguments.seed, chaos.tally)
        tally = await chaos.run(faults, arguments.clients, arguments.seed)
    counts = {"exact": tally.exact, "cut": tally.cut, "resumed": int(tally.resumed), "wrong": len(tally.wrong)}
    print(json.dumps({**counts, "faults": tally.faults}))
    print("\n".join(tally.wrong[:20]))
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
