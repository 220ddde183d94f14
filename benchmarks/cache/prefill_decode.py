"""Time between tokens of running streams while long prompts arrive: one engine, or one for prefill and one for decode.

    PYTHONPATH=tests python -m benchmarks.cache.prefill_decode
    PYTHONPATH=tests python -m benchmarks.cache.prefill_decode --model Qwen3-0.6B --layers 4 --length 1024 --interval 4

Engines are processes with the same number of threads together: two for the one, one for each of the two. The streams
decode all the time. Every `--interval` seconds a new prompt of `--length` tokens asks for a few tokens: of the one
engine; or of the prefill engine, with `prefill_only`, and at the same time of the decode engine, with the other one as
source of blocks, as a gateway does. `idle`: the streams alone. A record's value is the 99th percentile of the
milliseconds between tokens of the streams.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.engine.speed import machine
from benchmarks.http.closed_loop import percentile
from benchmarks.real_shapes import SHAPES, write_model
from benchmarks.records import Recording
from proa.engine.v1 import core_pb2, service_pb2, service_pb2_grpc
from support.engine_client import engine_request
from support.processes import engine_process

_MODES = ("idle", "one", "two")
_WARM_UP_SECONDS = 3.0
_VOCAB_SIZE = 300  # of the random prompts; every model here has as many tokens


@dataclass
class Engine:
    """A client of one engine."""

    channel: grpc.aio.Channel
    source: core_pb2.KvSource

    async def generate(self, request: core_pb2.EngineCoreRequest) -> list[float]:
        """Return when each message with tokens came, or when the call ended if there is none."""
        stub = service_pb2_grpc.EngineServiceStub(self.channel)
        times = [
            time.perf_counter()
            async for message in stub.Generate(service_pb2.GenerateRequest(request=request))
            if message.output.new_token_ids
        ]
        return times or [time.perf_counter()]


@dataclass
class Figures:
    """Seconds."""

    gaps: list[float] = field(default_factory=list)  # between tokens of the streams
    first_tokens: list[float] = field(default_factory=list)  # of the long prompts


async def connect(address: str) -> Engine:
    channel = grpc.aio.insecure_channel(address)
    info = await service_pb2_grpc.EngineServiceStub(channel).GetModelInfo(service_pb2.GetModelInfoRequest())
    addresses = [f"127.0.0.1:{port}" for port in info.kv_transfer.ports]
    return Engine(channel, core_pb2.KvSource(addresses=addresses, wait_ms=30_000))


async def stream(engine: Engine, prompt: Sequence[int], until: float, figures: Figures, began: float) -> None:
    """Decode until the time is over, and note the gaps after the warm-up."""
    stub = service_pb2_grpc.EngineServiceStub(engine.channel)
    while time.perf_counter() < until:
        request = engine_request(prompt, max_tokens=400, temperature=0.0)
        call = stub.Generate(service_pb2.GenerateRequest(request=request))
        last = 0.0
        async for message in call:
            now = time.perf_counter()
            if now > until:
                call.cancel()
                break
            if message.output.new_token_ids:
                if last > began:
                    figures.gaps.append(now - last)
                last = now


async def ask_long(prefill: Engine | None, decode: Engine, prompt: Sequence[int], figures: Figures) -> None:
    """Ask for a few tokens behind a long prompt, which `prefill` computes if there is such an engine."""
    request = engine_request(prompt, max_tokens=4, temperature=0.0)
    began = time.perf_counter()
    if prefill is None:
        times = await decode.generate(request)
    else:
        computed = core_pb2.EngineCoreRequest()
        computed.CopyFrom(request)
        computed.prefill_only = True
        request.kv_source.CopyFrom(prefill.source)
        _, times = await asyncio.gather(prefill.generate(computed), decode.generate(request))
    figures.first_tokens.append(times[0] - began)


async def measure(mode: str, addresses: Sequence[str], options: argparse.Namespace) -> Figures:
    rows, figures = random.Random(1), Figures()
    engines = [await connect(address) for address in addresses]
    decode, prefill = engines[-1], engines[0] if mode == "two" else None
    began = time.perf_counter() + _WARM_UP_SECONDS
    until = began + options.seconds
    async with asyncio.TaskGroup() as tasks:
        for _ in range(options.streams):
            tasks.create_task(stream(decode, rows.choices(range(_VOCAB_SIZE), k=32), until, figures, began))
        await asyncio.sleep(_WARM_UP_SECONDS)
        while mode != "idle" and time.perf_counter() < until - options.interval:
            prompt = rows.choices(range(_VOCAB_SIZE), k=options.length)
            tasks.create_task(ask_long(prefill, decode, prompt, figures))
            await asyncio.sleep(options.interval)
    for engine in engines:
        await engine.channel.close()
    return figures


def run(mode: str, arguments: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Start the engines of a mode and measure."""
    roles = {"idle": ["both"], "one": ["both"], "two": ["prefill", "decode"]}[mode]
    threads = 2 if mode == "one" else 1
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(
                engine_process(*arguments, f"--role={role}", env={"OMP_NUM_THREADS": str(threads)}, seconds=300.0)
            )[1]
            for role in roles
        ]
        figures = asyncio.run(measure(mode, addresses, options))
    shown = {f"gap_p{round(share * 100)}": percentile(figures.gaps, share) for share in (0.5, 0.9, 0.99, 1.0)}
    if figures.first_tokens:
        shown |= {f"long_ttft_p{round(share * 100)}": percentile(figures.first_tokens, share) for share in (0.5, 0.9)}
    counts = {"tokens": len(figures.gaps), "long_prompts": len(figures.first_tokens)}
    return {"mode": mode} | {f"{name}_ms": round(value * 1e3, 1) for name, value in shown.items()} | counts


def record(figures: dict[str, Any]) -> dict[str, Any]:
    note = ", ".join(f"{name} {value}" for name, value in figures.items() if name not in ("mode", "gap_p99_ms"))
    return {"value": figures["gap_p99_ms"], "unit": "ms", "note": note}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin", choices=["builtin", *SHAPES])
    parser.add_argument("--layers", type=int, help="of a real shape (default: all)")
    parser.add_argument("--workloads", nargs="+", default=list(_MODES), choices=_MODES)
    parser.add_argument("--engine-arguments", nargs="+", default=[], metavar="NAME=VALUE", help="without their dashes")
    parser.add_argument("--json", type=Path, help="write the records to this file, after each workload")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--length", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from one long prompt to the next")
    parser.add_argument("--seconds", type=float, default=20.0)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    recording = Recording(options.json, machine=machine())
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["--skip-tokenizer-init", "--kv-offloading-size=1", "--kv-transfer-address=127.0.0.1:0"]
        arguments += [f"--{argument}" for argument in options.engine_arguments]
        if options.model == "builtin":
            arguments += ["--model=builtin"]
        else:
            write_model(options.model, Path(directory), options.layers)
            arguments += [f"--model={directory}", "--load-format=dummy", f"--max-model-len={options.length + 512}"]
        for mode in options.workloads:
            figures = run(mode, arguments, options)
            print(json.dumps(figures), flush=True)
            recording.add(mode, record(figures))


if __name__ == "__main__":
    main()
