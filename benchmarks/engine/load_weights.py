"""Load the weights of a folder in several ways, each in a process of its own, in turn: GB/s, CPU seconds, memory.

    python -m benchmarks.engine.load_weights --gigabytes 4 --runs 3 --json load_weights.json
    python -m benchmarks.engine.load_weights --folder /models/Llama-3.1-8B --delay 2

- `ahead`: as the engine does, layer by layer, each tensor as it is stored.
- `hashed`: the same with the digest of the weights, as for `--kv-offloading-path`, `--kv-disk-path` and
  `--kv-transfer-address`.
- `one-by-one`: `safe_open` of safetensors, which maps the files, in the same order.
- `fastsafetensors`: the package, without GPUDirect storage.
- `runai`: the package runai-model-streamer.

All end with every tensor in memory of its own on the device: a GPU if there is one, else the CPU. `cold`: the files are
removed from the page cache before each run. `slow`: cold, and read through a FUSE file system (package mfusepy and
/dev/fuse, as root) that answers each request, of at most 128 KiB to 1 MiB, `--delay` milliseconds later. Without
`--folder`, files of random bytes with the shapes of a small Llama are written to a temporary folder.
"""

import argparse
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.records import write_json
from proa_engine.models.digest import WeightsDigest
from proa_engine.models.weight_sources import CheckpointWeights
from proa_engine.sources.weight_headers import read_headers

HIDDEN, INNER, VOCABULARY, LAYERS_PER_FILE = 2048, 8192, 64_000, 4
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
_NUMBER = re.compile(r"\d+")
_PROGRAM = (sys.executable, "-m", "benchmarks.engine.load_weights")


def write_files(folder: Path, num_bytes: float) -> None:
    """Write files of about `num_bytes` in all, in bfloat16."""
    drawn = torch.randint(0, 256, (2 * VOCABULARY * HIDDEN,), dtype=torch.uint8).view(torch.bfloat16)

    def tensor(shape: Sequence[int]) -> torch.Tensor:
        return drawn[: torch.Size(shape).numel()].reshape(*shape).clone()

    layer_bytes = sum(2 * torch.Size(shape).numel() for shape in LAYER.values())
    num_layers = max(int(num_bytes - drawn.nbytes) // layer_bytes, 1)
    save_file({"model.embed_tokens.weight": tensor((VOCABULARY, HIDDEN))}, folder / "model-embedding.safetensors")
    for first in range(0, num_layers, LAYERS_PER_FILE):
        layers = range(first, min(first + LAYERS_PER_FILE, num_layers))
        tensors = {f"model.layers.{layer}.{name}.weight": tensor(LAYER[name]) for layer in layers for name in LAYER}
        save_file(tensors, folder / f"model-{first:05}.safetensors")
    os.sync()


def weight_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def in_order_of_layers(names: Sequence[str]) -> list[str]:
    numbers = {name: [int(number) for number in _NUMBER.findall(name)] for name in names}
    return sorted(names, key=lambda name: (numbers[name][:1], names.index(name)))


def load_ahead(folder: Path, device: torch.device, digest: WeightsDigest | None = None) -> list[torch.Tensor]:
    tensors = read_headers(weight_paths(folder))
    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    with CheckpointWeights(folder, torch.bfloat16, device, digest) as checkpoint:
        checkpoint.begin(lambda _: False, lambda _: None)
        return [
            checkpoint.take(name, tensors[name].shape, None, types[tensors[name].dtype])
            for name in in_order_of_layers(list(tensors))
        ]


def load_hashed(folder: Path, device: torch.device) -> list[torch.Tensor]:
    return load_ahead(folder, device, WeightsDigest())


def load_one_by_one(folder: Path, device: torch.device) -> list[torch.Tensor]:
    with ExitStack() as files:
        of: dict[str, Any] = {}
        for path in weight_paths(folder):
            file = files.enter_context(safe_open(path, framework="pt"))
            of |= dict.fromkeys(file.keys(), file)
        return [of[name].get_tensor(name).to(device, copy=True) for name in in_order_of_layers(list(of))]


def load_fastsafetensors(folder: Path, device: torch.device) -> list[torch.Tensor]:
    from fastsafetensors import fastsafe_open  # type: ignore[import-not-found]

    paths = [str(path) for path in weight_paths(folder)]
    with fastsafe_open(paths, nogds=True, device=str(device)) as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118


def load_runai(folder: Path, device: torch.device) -> list[torch.Tensor]:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in weight_paths(folder)], device=str(device))
        return [tensor for _, tensor in streamer.get_tensors()]


LOADERS: dict[str, tuple[str, Callable[[Path, torch.device], list[torch.Tensor]]]] = {  # with the package
    "ahead": ("proa_engine", load_ahead),
    "hashed": ("proa_engine", load_hashed),
    "one-by-one": ("safetensors", load_one_by_one),
    "fastsafetensors": ("fastsafetensors", load_fastsafetensors),
    "runai": ("runai_model_streamer", load_runai),
}


def measure(name: str, folder: Path, device: torch.device) -> dict[str, float]:
    """Load once, in this process."""
    torch.zeros(1, device=device)  # makes the context of a GPU
    started, used = time.monotonic(), time.process_time()
    tensors = LOADERS[name][1](folder, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - used
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": num_bytes, "seconds": seconds, "cpu_seconds": cpu_seconds, "rss_bytes": most_bytes}


def measure_in_process(name: str, folder: Path, is_cold: bool) -> dict[str, float]:
    for path in weight_paths(folder) if is_cold else []:
        evict(path)
    program = [*_PROGRAM, "--folder", str(folder), "--in-process", name]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def evict(path: Path) -> None:
    """Remove a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


@contextmanager
def slow_disk(folder: Path, delay: float) -> Iterator[Path]:
    """A folder with the same files, behind a file system that answers a read `delay` seconds later."""
    with tempfile.TemporaryDirectory() as mounted:
        server = subprocess.Popen([*_PROGRAM, "--folder", str(folder), "--serve", mounted, str(delay)])
        try:
            while not os.path.ismount(mounted):
                if server.poll() is not None:
                    raise RuntimeError("the FUSE file system could not be mounted")
                time.sleep(0.1)
            yield Path(mounted)
        finally:
            subprocess.run(["fusermount3", "-u", mounted], check=False)  # ends the server
            server.wait()


def serve_slowly(folder: Path, mounted: str, delay: float) -> None:
    import mfusepy  # type: ignore[import-not-found]

    class SlowFiles(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            try:
                found = os.stat(f"{folder}{path}")
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from error
            return {"st_mode": found.st_mode, "st_size": found.st_size, "st_nlink": 1, "st_mtime": found.st_mtime_ns}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(f"{folder}{path}")]

        def open(self, path: str, flags: int) -> int:
            return os.open(f"{folder}{path}", os.O_RDONLY)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            time.sleep(delay)
            return os.pread(fh, size, offset)

    mfusepy.FUSE(SlowFiles(), mounted, foreground=True, ro=True, max_threads=64)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--folder", type=Path, help="with *.safetensors files; default: random ones")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of random files")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds of a slow disk's read; 0: no slow disk")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--in-process", choices=LOADERS, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.serve:
        serve_slowly(options.folder, options.serve[0], float(options.serve[1]))
        return
    if options.in_process:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        print(json.dumps(measure(options.in_process, options.folder, device)))
        return
    with ExitStack() as stack:
        folder: Path = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.folder is None:
            write_files(folder, options.gigabytes * 1e9)
        disks = [("cold", folder, True), ("warm", folder, False)]
        if options.delay:
            disks.append(("slow", stack.enter_context(slow_disk(folder, options.delay / 1000)), True))
        records = compare(options.workloads, disks, options.runs)
    if options.json:
        write_json(options.json, {"machine": machine(), "records": records, "problems": {}})


def compare(names: Sequence[str], disks: Sequence[tuple[str, Path, bool]], runs: int) -> dict[str, Any]:
    """Measure all ways in turn, `runs` times on each disk. Prints the medians."""
    records: dict[str, Any] = {}
    for name in names:
        found = importlib.util.find_spec(LOADERS[name][0]) is not None
        records[name] = {"complete": found, "rows": []}
        if not found:
            print(f"{name}: the package {LOADERS[name][0]} is not installed")
    present = [name for name in names if records[name]["complete"]]
    for disk, folder, is_cold in disks:
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in present}
        for _ in range(runs):
            for name in present:
                taken[name].append(measure_in_process(name, folder, is_cold))
        for name in present:
            speeds = sorted(each["bytes"] / each["seconds"] / 1e9 for each in taken[name])
            row = {
                "disk": disk,
                "GB/s": f"{median(speeds):.2f}",
                "of all runs": f"{speeds[0]:.2f} to {speeds[-1]:.2f}",
                "CPU seconds": f"{median(each['cpu_seconds'] for each in taken[name]):.2f}",
                "GB resident": f"{max(each['rss_bytes'] for each in taken[name]) / 1e9:.2f}",
            }
            records[name]["rows"].append(row)
            print(f"{name}: {', '.join(f'{title} {value}' for title, value in row.items())}", flush=True)
    return records


def machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"


if __name__ == "__main__":
    main()
