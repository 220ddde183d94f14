"""Bytes a second from one mover to another over loopback, and the CPU time that each takes.

    python -m benchmarks.cache.kv_transfer
    python -m benchmarks.cache.kv_transfer --page-kib 16 --mib 256 --rounds 5

Two mover processes, one job of all pages in each round. The best round counts: the machine may be shared.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import psutil

from proa_engine.config import PeerTls
from proa_engine.core.kv.mover import FetchJob
from proa_engine.framing import FrameReader, encode
from proa_engine.mover.arena import Arena
from proa_engine.mover.layout import ArenaLayout
from proa_engine.mover.messages import Copied, Fetch, Init, Listening, Progress, ToWorker
from proa_engine.option_groups import LOOPBACK


@dataclass
class RunningMover:
    """A mover process and its worker's end of the control socket."""

    process: psutil.Process
    control: socket.socket
    reader: FrameReader[ToWorker]
    arena: Arena
    port: int

    @property
    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def start(layout: ArenaLayout, fingerprint: bytes = bytes(32), tls: PeerTls | None = None) -> RunningMover:
    descriptor = os.memfd_create("proa-bench")
    os.ftruncate(descriptor, layout.num_bytes)
    control, theirs = socket.socketpair()
    command = [sys.executable, "-m", "proa_engine", "mover", "--control", str(theirs.fileno()), "--arena"]
    process = subprocess.Popen([*command, str(descriptor)], pass_fds=(theirs.fileno(), descriptor))
    theirs.close()
    init = Init(
        layout=layout,
        host="127.0.0.1",
        port=0,
        rank=0,
        num_ranks=1,
        fingerprint=fingerprint,
        since=time.time(),
        tls=tls,
        sources=LOOPBACK,
    )
    control.sendall(encode(init))
    reader: FrameReader[ToWorker] = FrameReader(control, msgspec.msgpack.Decoder(ToWorker))
    listening = reader.read()
    assert isinstance(listening, Listening), listening
    return RunningMover(psutil.Process(process.pid), control, reader, Arena(descriptor, layout), listening.port or 0)


def fill(source: RunningMover, chain: list[bytes]) -> None:
    """Write every page, and let the mover settle them."""
    for page in range(len(chain)):
        (buffer,) = source.arena.buffers(page)
        buffer[:] = os.urandom(4096)[:1] * len(buffer)
        source.arena._serials[page] = 1
    source.control.sendall(encode(Copied(1, tuple(enumerate(chain)))))


def fetch(target: RunningMover, address: str, chain: Sequence[bytes], job_id: int) -> int:
    """Fetch all pages from the mover at `address`. Returns their bytes."""
    job = FetchJob(
        job_id=job_id,
        addresses=(address,),
        chain=tuple(chain),
        num_held=0,
        pages=tuple(range(len(chain))),
        needs_checkpoint=False,
        copied=0,
        wait_ms=5000,
        max_ms=60_000,
        since=0.0,
    )
    target.control.sendall(encode(Fetch(job)))
    while not isinstance(message := target.reader.read(), Progress):
        assert message is not None, "the mover ended"
    assert message.fetched.num_blocks == len(chain), message.fetched
    return message.fetched.num_bytes


def time_fetch(source: RunningMover, target: RunningMover, chain: Sequence[bytes], job_id: int) -> tuple[float, float]:
    """Fetch all pages. Returns the seconds and the CPU seconds of both movers."""
    cpu, began = source.cpu_seconds + target.cpu_seconds, time.perf_counter()
    fetch(target, f"127.0.0.1:{source.port}", chain, job_id)
    seconds = time.perf_counter() - began
    return seconds, source.cpu_seconds + target.cpu_seconds - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-kib", type=int, default=2048, help="size of a page in KiB")
    parser.add_argument("--mib", type=int, default=256, help="MiB to send in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tls", nargs=3, metavar="FILE", help="certificate for proa-engine, its key and its authority (PEM)"
    )
    arguments = parser.parse_args()
    num_pages = arguments.mib * 1024 // arguments.page_kib
    layout = ArenaLayout(num_pages=num_pages, page_bytes=arguments.page_kib * 1024)
    chain = [index.to_bytes(16, "little") for index in range(num_pages)]
    tls = None if arguments.tls is None else PeerTls(*arguments.tls)
    source, target = start(layout, tls=tls), start(layout, tls=tls)
    fill(source, chain)
    time_fetch(source, target, chain, 0)  # waits for the checksums
    rounds = [time_fetch(source, target, chain, job_id) for job_id in range(1, arguments.rounds + 1)]
    gib = arguments.mib / 1024
    best, cpu = min(seconds for seconds, _ in rounds), min(cpu for _, cpu in rounds)
    figures = {"gb_per_second": arguments.mib * 2**20 / best / 1e9, "cpu_seconds_per_gib": cpu / gib}
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
