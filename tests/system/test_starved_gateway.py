"""A gateway without CPU time, under 1,000 streams: Kubernetes neither restarts it nor takes it out of its Service."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

import pytest

from support.chart import GATEWAY, lookup, needs_helm, render
from support.processes import fake_engine_process, free_port, gateway_process

pytestmark = needs_helm
STREAMS = 1000
STARVED_SECONDS = 20.0
BODY = json.dumps({"model": "fake", "stream": True, "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]})
REQUEST = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n{BODY}"
).encode()


class Kubelet(threading.Thread):
    """Asks a probe as Kubernetes does. `worst`: failures that followed each other."""

    def __init__(self, probe: dict[str, Any], port: int) -> None:
        super().__init__(daemon=True)
        self.threshold: int = probe["failureThreshold"]
        self.worst = 0
        self.asked = 0
        self._period, self._timeout = probe["periodSeconds"], probe["timeoutSeconds"]
        self._url = f"http://127.0.0.1:{port}{probe['httpGet']['path']}"
        self._over = threading.Event()

    def run(self) -> None:
        failures = 0
        while not self._over.wait(self._period):
            failures = 0 if self._succeeds() else failures + 1
            self.asked += 1
            self.worst = max(self.worst, failures)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _succeeds(self) -> bool:
        try:
            with urlopen(self._url, timeout=self._timeout):
                return True
        except OSError:
            return False


@contextmanager
def probed(port: int) -> Iterator[list[Kubelet]]:
    gateway = lookup(render(), *GATEWAY)
    kubelets = [Kubelet(gateway[f"{name}Probe"], port) for name in ("liveness", "readiness")]
    for kubelet in kubelets:
        kubelet.start()
    yield kubelets
    for kubelet in kubelets:
        kubelet.stop()


def starve(pid: int) -> None:
    """Leave the process a twentieth of its time."""
    end = time.monotonic() + STARVED_SECONDS
    while time.monotonic() < end:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.95)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)


async def stream(port: int, started: asyncio.Semaphore) -> bool:
    """Whether a stream came to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    started.release()
    rest = await reader.read()
    writer.close()
    return head.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in rest


@pytest.mark.timeout(240)
async def test_a_gateway_without_cpu_time_keeps_its_streams_and_its_place() -> None:
    health_port, started = free_port(), asyncio.Semaphore(0)
    engine = fake_engine_process("--text=one ", "--repeat", "--step-delay=0.5", "--max-num-seqs=1024")
    arguments = ("--health-port", str(health_port), "--request-timeout=600")
    with engine as (_, address), gateway_process(address, *arguments) as (gateway, port), probed(health_port) as probes:
        streams = [asyncio.create_task(stream(port, started)) for _ in range(STREAMS)]
        for _ in range(STREAMS):
            await started.acquire()
        await asyncio.to_thread(starve, gateway.pid)
        assert all(await asyncio.gather(*streams))
    assert all(probe.asked for probe in probes)
    assert all(probe.worst < probe.threshold for probe in probes)
