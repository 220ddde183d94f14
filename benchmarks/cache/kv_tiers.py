"""Time to the first token of a prompt whose KV cache is on the device, in host memory, in another engine, on disk, or
nowhere.

    python -m benchmarks.cache.kv_tiers --model builtin
    python -m benchmarks.cache.kv_tiers --model Qwen3-0.6B --layers 4 --workloads tiers-256 tiers-1024

One request at a time, greedy. A prompt is computed; asked again; then the device's cache is filled with other prompts,
and it is asked a third time, from the host; then a second engine in this process, which never saw it, fetches it; then
the first engine, and the kernel, forget what is in memory, and it is asked from disk. The best of several rounds, and
their median. `tiers-L`: prompts of L tokens. A record's value is the best time from the host; its rate counts all of
the prompt's keys and values over what the host takes longer than the device.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engine.speed import machine
from benchmarks.real_shapes import SHAPES, write_model
from benchmarks.records import Recording
from proa.contract import EngineCoreRequest, KvSource, SamplingParams
from proa_engine.builtin import builtin_model_folder
from proa_engine.config import EngineConfig
from proa_engine.engine_parts import EngineParts, load_engine
from proa_engine.option_groups import KvTiers

BLOCK_SIZE = 16
TIERS = ("computed", "device", "host", "peer", "disk")
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Prompts:
    """Asks one engine for first tokens."""

    def __init__(self, parts: EngineParts, seed: int) -> None:
        self._core = parts.core
        self._random = random.Random(seed)
        self._vocab_size = parts.limits.vocab_size
        self._num_asked = 0

    def make(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=num_tokens)

    def ask(self, prompt: list[int], source: KvSource | None = None) -> tuple[float, int]:
        """Seconds to the first token, and the number of cached tokens. Then all stores are finished."""
        self._num_asked += 1
        request = EngineCoreRequest(
            request_id=f"{self._num_asked}",
            prompt_token_ids=prompt,
            sampling_params=PARAMS,
            arrival_time=time.time(),
            kv_source=source,
        )
        started = time.perf_counter()
        self._core.submit(request)
        while (outputs := self._core.step()) is None or not outputs.outputs:
            self._core.wait_for_work()
        seconds = time.perf_counter() - started
        while self._core.has_unfinished_requests():
            self._core.step()
        return seconds, outputs.outputs[0].num_cached_tokens or 0

    @property
    def num_on_disk(self) -> int:
        """Blocks that the engine knows to be on disk."""
        disk = self._core.counters().cache.disk
        assert disk is not None
        return disk.num_blocks

    def forget_memory(self, num_on_disk: int, disk: Path) -> None:
        """Wait until so many blocks are on disk, and forget those of the device, of the host, and of the kernel."""
        while self.num_on_disk < num_on_disk:
            self._core.wait_for_work(timeout=0.1)
            self._core.step()
        manager = self._core._scheduler._manager
        manager._cache.reset()
        manager.tiers.host.reset()
        os.sync()
        for path in disk.rglob("*.data"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(parts: EngineParts, peer: EngineParts, length: int, num_rounds: int, disk: Path) -> dict[str, list[float]]:
    """Milliseconds by tier, one for each round."""
    prompts, of_peer = Prompts(parts, seed=length), Prompts(peer, seed=length)
    transfer = parts.executor.started.kv_transfer
    assert transfer is not None
    source = KvSource(addresses=tuple(f"127.0.0.1:{port}" for port in transfer.ports))
    capacity = parts.limits.lengths.cache_capacity
    others = -(-capacity // length) + 1  # prompts that fill the device
    found: dict[str, list[float]] = {tier: [] for tier in TIERS}
    for _ in range(num_rounds):
        prompt = prompts.make(length)
        num_on_disk = prompts.num_on_disk + (length - 1) // BLOCK_SIZE
        for tier in found:
            if tier == "disk":
                prompts.forget_memory(num_on_disk, disk)
            if tier == "host":
                for _ in range(others):
                    prompts.ask(prompts.make(length))
            seconds, num_cached = of_peer.ask(prompt, source) if tier == "peer" else prompts.ask(prompt)
            expected = 0 if tier == "computed" else (length - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert num_cached == expected, f"{tier}: {num_cached} cached tokens instead of {expected}"
            found[tier].append(seconds * 1e3)
    return found


def record(parts: EngineParts, length: int, found: dict[str, list[float]]) -> dict[str, Any]:
    best = {tier: min(times) for tier, times in found.items()}
    host = parts.core.counters().cache.host
    assert host is not None
    num_bytes = length // BLOCK_SIZE * host.page_bytes
    rate = num_bytes / max(best["host"] - best["device"], 1e-3) / 1e6
    others = ", ".join(f"{tier} {best[tier]:.2f}" for tier in TIERS if tier != "host")
    return {"value": best["host"], "unit": "ms", "note": f"{others}; {rate:.1f} GB/s", "tiers": found}


def make_config(arguments: argparse.Namespace, folder: Path, disk: Path) -> EngineConfig:
    longest = max(map(length_of, arguments.workloads))
    return EngineConfig(
        model=str(folder),
        load_format="auto" if arguments.model == "builtin" else "dummy",
        skip_tokenizer_init=True,
        max_model_len=longest + BLOCK_SIZE,
        max_num_seqs=8,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=2 * (longest // BLOCK_SIZE + 2),
        kv_tiers=KvTiers(
            kv_offloading_size=arguments.host_gib,
            kv_transfer_address="127.0.0.1:0",
            kv_disk_path=str(disk),
            kv_disk_size=8.0,
            kv_disk_write_mb_per_second=10_000.0,
        ),
    )


def length_of(workload: str) -> int:
    return int(workload.removeprefix("tiers-"))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin", choices=["builtin", *SHAPES])
    parser.add_argument("--layers", type=int, help="of a real shape (default: all)")
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["tiers-128", "tiers-256", "tiers-1024", "tiers-2000"],
        metavar="NAME",
        help="tiers-L: of prompts of L tokens",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-gib", type=float, default=2.0)
    parser.add_argument("--disk", type=Path, help="folder of the disk to measure (default: that of temporary files)")
    parser.add_argument("--json", type=Path, help="write the records to this file, after each workload")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    recording = Recording(arguments.json, machine=machine())
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        folder = builtin_model_folder()
        if arguments.model != "builtin":
            folder = write_model(arguments.model, Path(directory), arguments.layers)
        disk = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.disk))
        config = make_config(arguments, folder, Path(disk))
        parts, peer = load_engine(config, print), load_engine(config, print)
        stack.callback(parts.shutdown)
        stack.callback(peer.shutdown)
        print(f"tokens; ms (best, median): {', '.join(TIERS)}; times faster: host, peer, disk")
        for workload in arguments.workloads:
            length = length_of(workload)
            found = measure(parts, peer, length, arguments.rounds, Path(disk))
            cells = [f"{min(times):>8.2f} {statistics.median(times):>8.2f}" for times in found.values()]
            ratios = [min(found["computed"]) / min(found[tier]) for tier in TIERS[2:]]
            print(f"{length:>7} {' '.join(cells)}  {' '.join(f'{ratio:.1f}' for ratio in ratios)}", flush=True)
            recording.add(workload, record(parts, length, found))


if __name__ == "__main__":
    main()
