"""How much slower an engine decodes while its mover serves blocks at full rate.

    python -m benchmarks.cache.kv_serving
    python -m benchmarks.cache.kv_serving --rounds 40 --shared-core

The engine decodes on core 0. Its mover, and a peer that fetches the same blocks again and again, are on core 1; with
`--shared-core` the mover is on core 0 too, as in a container with one core. Rounds with and without fetches take turns,
so that other load on the machine meets both; reports the medians of a step and of the ratio of neighbouring rounds, of
wall time and of the CPU time of the engine's process.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import psutil

from benchmarks.cache.kv_transfer import fetch, start
from proa.blocks import hash_block, root_hash
from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.engine_parts import EngineParts, load_engine
from proa_engine.mover.layout import ArenaLayout
from proa_engine.option_groups import KvTiers

BLOCK_SIZE = 16
NUM_TOKENS = 1600  # of the prompt whose blocks are fetched
MODEL = "builtin"


@dataclass(frozen=True)
class Served:
    """What the peer fetches, and from where."""

    address: str
    fingerprint: str  # hexadecimal
    page_bytes: int
    chain: list[str]  # hexadecimal


def run_peer(served: Served) -> None:
    """Fetch all blocks after each line of the input, until the next line. Prints the bytes and the seconds."""
    chain = tuple(map(bytes.fromhex, served.chain))
    layout = ArenaLayout(num_pages=len(chain), page_bytes=served.page_bytes)
    mover = start(layout, bytes.fromhex(served.fingerprint))
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)

    Thread(target=read, daemon=True).start()
    job_id = 0
    while lines.get().strip() != "end":
        began, num_bytes = time.perf_counter(), 0
        while lines.empty():
            job_id += 1
            num_bytes += fetch(mover, served.address, chain, job_id)
        lines.get()
        print(json.dumps([num_bytes, time.perf_counter() - began]), flush=True)


class Costs(NamedTuple):
    """Seconds of a step."""

    wall: float
    cpu: float  # of the engine's process


@contextmanager
def peer(served: Served) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "benchmarks.cache.kv_serving", "--peer", json.dumps(vars(served))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def submit(parts: EngineParts, name: str, prompt: Sequence[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    parts.core.submit(
        EngineCoreRequest(request_id=name, prompt_token_ids=list(prompt), sampling_params=params, arrival_time=0.0)
    )


def time_steps(parts: EngineParts, seconds: float, streams: int, rows: random.Random) -> Costs:
    """Decode for so long."""
    costs, until = list[Costs](), time.perf_counter() + seconds
    while time.perf_counter() < until:
        if parts.core.stats().num_running_reqs == 0:
            for index in range(streams):
                prompt = rows.choices(range(200), k=20)
                submit(parts, f"{index} {time.perf_counter()}", prompt, 200)
            parts.core.step()
        began = Costs(time.perf_counter(), time.process_time())
        parts.core.step()
        costs.append(Costs(time.perf_counter() - began.wall, time.process_time() - began.cpu))
    return Costs(*map(statistics.median, zip(*costs, strict=True)))


def serve(parts: EngineParts, rows: random.Random) -> Served:
    """Compute a prompt, whose blocks the mover then serves."""
    prompt = rows.choices(range(200), k=NUM_TOKENS + 1)
    submit(parts, "served", prompt, 1)
    while parts.core.has_unfinished_requests() or parts.core.has_work():
        parts.core.step()
    chain, parent = list[str](), root_hash(MODEL, "")
    for block in range(NUM_TOKENS // BLOCK_SIZE):
        parent = hash_block(parent, prompt[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE], ())
        chain.append(parent.hex())
    transfer = parts.executor.started.kv_transfer
    host = parts.core.counters().cache.host
    assert transfer is not None
    assert host is not None
    return Served(f"127.0.0.1:{transfer.ports[0]}", transfer.fingerprint.hex(), host.page_bytes, chain)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="of each kind")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--shared-core", action="store_true", help="the engine's mover is on its core")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.peer:
        run_peer(Served(**json.loads(arguments.peer)))
        return
    rows = random.Random(1)
    config = EngineConfig(
        model=MODEL,
        device="cpu",
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=1000,
        kv_tiers=KvTiers(kv_offloading_size=0.25, kv_transfer_address="127.0.0.1:0"),
    )
    parts = load_engine(config, print)
    try:
        (mover,) = psutil.Process().children()
        served = serve(parts, rows)
        os.sched_setaffinity(0, {1})
        with peer(served) as process:  # it inherits the core
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), {0})
            for thread in os.listdir(f"/proc/{mover.pid}/task"):
                os.sched_setaffinity(int(thread), {0 if arguments.shared_core else 1})
            assert process.stdout is not None
            time_steps(parts, 3.0, arguments.streams, rows)
            alone, beside, rates = list[Costs](), list[Costs](), list[float]()
            for _ in range(arguments.rounds):
                alone.append(time_steps(parts, arguments.seconds, arguments.streams, rows))
                tell(process, "begin")
                beside.append(time_steps(parts, arguments.seconds, arguments.streams, rows))
                tell(process, "stop")
                num_bytes, seconds = json.loads(process.stdout.readline())
                rates.append(num_bytes / seconds)
            tell(process, "end")
    finally:
        parts.shutdown()
    figures = {"served_gb_per_second": round(statistics.median(rates) / 1e9, 2)}
    for kind in Costs._fields:
        without, fetched = ([getattr(costs, kind) for costs in rounds] for rounds in (alone, beside))
        figures |= {
            f"step_{kind}_ms": round(statistics.median(without) * 1e3, 3),
            f"step_{kind}_ms_serving": round(statistics.median(fetched) * 1e3, 3),
            f"{kind}_ratio": round(statistics.median(b / a for a, b in zip(without, fetched, strict=True)), 3),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
