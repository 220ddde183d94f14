"""Benchmark the engine offline, on the workloads that engines are compared by; random weights of real models' shapes.

    python -m benchmarks.engine.speed --model Llama-3.1-8B --quantization fp8 --json figures.json

- `start`: seconds from the process's start to a warmed-up engine; a cold start if TRITON_CACHE_DIR is empty.
- `restart`: the same, of a process that finds there what an earlier one has compiled, as with `--compile-cache`.
- `mixed`: 256 requests, prompts and outputs of 100 to 1,024 tokens, their lengths in same_work.json; output tokens/s,
  including prefill, median of three runs.
- `decode-B`: B requests after prompts of 512 tokens and 8 outputs; milliseconds a step, over 128 steps.
- `prefill-NxL`: N prompts of L tokens; milliseconds until all have their first token, median of three; with
  `prefill-NxLxR` of R runs.
- `batch-NxPxO`: N requests at once, prompts of P tokens and outputs of O; output tokens/s, including prefill.
- `closed-C`: a closed loop of C clients, prompts of 128 tokens and outputs of 1,024; output tokens/s.
- `adapters-B`: `decode-B` with eight adapters in turn, of rank 16 and all linear layers; needs `enable_lora`.
- `repetitive-B`: B requests that repeat one token, so that every draft token is accepted; milliseconds a token.
- `images-N`: N requests with an image each, all different, 640 x 480 pixels, and 107 tokens of output, as many as in
  sglang #36411; requests/s, without resizing, which the gateway does.
- `profile-decode-B`, `profile-prefill-NxL`: the same kernel by kernel, see `engine_profile.py`.
- `own-…`: the same workload, sampled as the model's generation_config.json says: with top-k, top-p or both.
- `penalties-…`, `logprobs-…`, `grammar-…`: the same with presence, frequency and repetition penalties; with the log
  probabilities of the 5 most likely tokens; under a regular expression that more than 20,000 tokens match.

The clock starts before the first request is added. Temperature 0.6, end tokens ignored, prompts random, each new to the
prefix cache, which is on.
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import engine_profile
from benchmarks.engine.bench import FULL, GRAMMAR, OWN, SMALL, Bench, Figure, Sizes, vocab_size
from benchmarks.engine.floors import Card
from benchmarks.engine.timeline import table
from benchmarks.real_shapes import SHAPES, has_weights, write_model, write_tokenizer
from benchmarks.records import Recording

BATCHES = (1, 8, 32, 64, 128, 256)
PREFILLS = ("1x1024", "1x8192", "32x1024", "8x8192")
THROUGHPUT = "batch-512x1000x1000"  # what TensorRT-LLM publishes
OWN_DECODES = tuple(f"{OWN}decode-{batch}" for batch in (1, 64, 256))
TABLE = (
    *("start", "mixed"),
    *(f"decode-{batch}" for batch in BATCHES),
    *(f"prefill-{size}" for size in PREFILLS),
    *OWN_DECODES,
)


class StartLog(logging.Handler):
    """Collects and prints the engine's log lines while it starts: compilation, loading, memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        print(f"{seconds_since_start():.1f} s: {self.lines[-1]}", flush=True)  # a program without output hangs


def records(arguments: argparse.Namespace, log: StartLog, sizes: Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the workloads; yields each one's name and record."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(arguments.model, Path(scratch))
        config = json.loads((folder / "config.json").read_text())
        given = llm_arguments(arguments, folder)
        if any(workload.startswith(GRAMMAR) for workload in arguments.workloads):
            (tokenizer := Path(scratch) / "tokenizer").mkdir()
            write_tokenizer(tokenizer, vocab_size(config))
            given |= {"tokenizer": str(tokenizer), "skip_tokenizer_init": False}
        bench = Bench(folder, given, config, sizes)
        ready = seconds_since_start()
        card: Card | None = None
        for workload in arguments.workloads:
            started = time.monotonic()
            if workload in ("start", "restart"):
                record: dict[str, Any] = Figure(ready, "s").record() | {"log": log.lines}
            elif workload.startswith("profile-"):
                card = card or engine_profile.card()
                name, fp8 = workload.removeprefix("profile-"), arguments.quantization == "fp8"
                record = engine_profile.measure(bench, name, config, card, context=sizes.context, fp8=fp8)
            else:
                record = bench.run(workload).record()
            yield workload, record | {"took": round(time.monotonic() - started, 1)}


def seconds_since_start() -> float:
    """Seconds since this process started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # proc(5), starttime
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def llm_arguments(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    chosen = {
        "load_format": "auto" if has_weights(folder) else "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": arguments.max_model_len,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "enforce_eager": arguments.enforce_eager,
    }
    optional = {"quantization": arguments.quantization, "kv_cache_dtype": arguments.kv_cache_dtype}
    given = {name: value for name, value in optional.items() if value is not None}
    options: dict[str, Any] = json.loads(arguments.options)
    return chosen | given | options


def machine() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} without a GPU"
    triton = getattr(__import__("triton"), "__version__", "none")
    return f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}, triton {triton}"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B", help=f"{', '.join(SHAPES)}, or a model's folder")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--options", default="{}", help="further arguments of LLM, as JSON")
    parser.add_argument("--workloads", nargs="+", default=TABLE, metavar="NAME", help=" ")
    parser.add_argument("--small", action="store_true", help="short lengths, only to check that everything runs")
    parser.add_argument("--json", type=Path, help="write the records to this file, after each workload")
    return parser


def show(workload: str, record: dict[str, Any]) -> str:
    if "value" in record:
        return f"{workload}: {record['value']:,.2f} {record['unit']} {record.get('note', '')}".rstrip()
    return f"{workload}:\n\n{table(record)}\n"


def main(argv: Sequence[str]) -> None:
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log = StartLog()
    engine_log = logging.getLogger("proa_engine")
    engine_log.setLevel(logging.INFO)
    engine_log.addHandler(log)
    recording = Recording(arguments.json, machine="", arguments=list(argv))
    for workload, record in records(arguments, log, SMALL if arguments.small else FULL):
        # Not before the start: it imports torch, which an engine does beside other work.
        if not recording.document["machine"]:
            recording.document["machine"] = machine()
            print(f"{arguments.model}: {recording.document['machine']}", flush=True)
        recording.add(workload, record)
        print(show(workload, record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
