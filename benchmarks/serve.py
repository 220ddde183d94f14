"""Throughput and latencies over HTTP with a closed loop of streaming clients, for the GPU report.

Starts an engine with random weights and gateways. The prompts are the same tokens as in `closed-C` of engine.py, so the
difference of the two results is the cost of HTTP. The clients are those of `proa bench serve`, in one process.

    PYTHONPATH=tests python benchmarks/serve.py --model Qwen3-0.6B --workloads http-64x1 http-256x2

- `serve-start`: seconds from the start of `proa-engine serve` until its gRPC health service says that it is loaded; a
  cold start if TRITON_CACHE_DIR is empty.
- `http-CxG`: C clients, G gateways. Reports percentiles of milliseconds to the first token and between chunks.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import FULL, SMALL, Sizes, closed_jobs
from closed_loop import Clients, percentile, run_clients
from real_shapes import SHAPES, has_weights, write_model, write_tokenizer
from records import write_json

from proa_cli.bench.client import Sample

START = "serve-start"
_MODEL = "model"
_PERCENTILES = (0.5, 0.9, 0.99)


def record(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Raises `SystemExit` if a request failed."""
    if errors := sorted({sample.error for sample in samples if sample.error}):
        raise SystemExit("requests failed: " + "; ".join(errors))
    values = {
        "ttft_ms": [sample.ttft * 1e3 for sample in samples],
        "inter_token_ms": [gap * 1e3 for sample in samples for gap in sample.gaps],
    }
    tokens = sum(sample.output_tokens for sample in samples)
    latencies = {
        f"{name}_p{round(share * 100)}": round(percentile(each, share), 2)
        for name, each in values.items()
        for share in _PERCENTILES
    }
    return {"value": tokens / seconds, "unit": "tokens/s", "requests": len(samples)} | latencies


@contextmanager
def started(options: argparse.Namespace, num_gateways: int) -> Iterator[tuple[list[int], int, float]]:
    """Start an engine with random weights and gateways. Yields the gateways' ports, the vocabulary's size, and the
    seconds that the engine took."""
    from support.processes import engine_process, gateway_process

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = write_model(options.model, scratch)
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        write_tokenizer(scratch, vocab_size)
        arguments = [f"--model={folder}", f"--tokenizer={scratch}", f"--served-model-name={_MODEL}"]
        arguments += [] if has_weights(folder) else ["--load-format=dummy"]
        arguments += [f"--max-model-len={options.max_model_len}"]
        arguments += [f"--quantization={options.quantization}"] if options.quantization else []
        arguments += ["--enforce-eager"] if options.enforce_eager else []
        began = time.monotonic()
        _, address = stack.enter_context(engine_process(*arguments))
        seconds = time.monotonic() - began
        ports = [stack.enter_context(gateway_process(address))[1] for _ in range(num_gateways)]
        yield ports, vocab_size, seconds


def records(options: argparse.Namespace, sizes: Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the workloads; yields each one's name and record."""
    names = [name for name in options.workloads if name != START]
    shapes = {name: tuple(map(int, name.removeprefix("http-").split("x"))) for name in names}
    with started(options, max((gateways for _, gateways in shapes.values()), default=0)) as (ports, vocab_size, start):
        if START in options.workloads:
            yield START, {"value": start, "unit": "s"}
        for name, (number, gateways) in shapes.items():
            prompts = [job.prompt for job in closed_jobs(number, vocab_size, sizes)]
            clients = Clients(ports[:gateways], _MODEL, number, prompts, sizes.closed[1], options.seconds)
            yield name, record(*run_clients(clients))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B", help=f"model to start: {', '.join(SHAPES)}, or a folder")
    parser.add_argument("--quantization")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--enforce-eager", action="store_true", help="start the engine without CUDA graphs")
    parser.add_argument("--workloads", nargs="+", default=["http-64x1"], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of one workload")
    parser.add_argument("--small", action="store_true", help="short prompts and outputs, to check that everything runs")
    parser.add_argument("--json", type=Path, help="write each record to this file")
    return parser


def main(argv: Sequence[str]) -> None:
    options = parser().parse_args(argv)
    document: dict[str, Any] = {"arguments": list(argv), "records": {}}
    for name, figures in records(options, SMALL if options.small else FULL):
        document["records"][name] = figures
        shown = ", ".join(f"{key} {value:,}" for key, value in figures.items() if key not in ("value", "unit"))
        if options.json is not None:
            write_json(options.json, document)
        print(f"{name}: {figures['value']:,.1f} {figures['unit']} {shown}".rstrip(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
