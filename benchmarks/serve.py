"""Throughput and latencies over HTTP, with a closed loop of streaming clients.

Measures running gateways (`--url`), or starts an engine with random weights and gateways. In that case the prompts are
the same tokens as in `closed-C` of engine.py, so the difference of the two results is the cost of HTTP.

    python benchmarks/serve.py --url http://127.0.0.1:8000 --workloads http-64x1
    PYTHONPATH=tests python benchmarks/serve.py --model Qwen3-0.6B --workloads http-64x1 http-256x2

`http-CxG`: C clients, G gateways. Reports percentiles of milliseconds to the first token and between tokens.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from bench import FULL, SMALL, Sizes, closed_jobs
from closed_loop import Load, Prompt, Sample, percentile, run_loads
from real_shapes import SHAPES, has_weights, write_model, write_tokenizer
from records import write_json

WORKLOADS = ("http-1x1", "http-16x1", "http-64x1", "http-256x2")
_SUBJECTS = ("a river", "the moon", "bread", "a small boat", "the sea", "an old tree", "rain", "a long road")
_TEXT_TURNS = 4  # requests of each client with `--url`
_PERCENTILES = (0.5, 0.9, 0.99)


def measure(
    ports: Sequence[int], clients: int, prompts: Sequence[Prompt], options: argparse.Namespace
) -> dict[str, Any]:
    """Run one closed loop, with the clients spread over the gateways and over processes."""
    with urlopen(f"http://127.0.0.1:{ports[0]}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    processes = min(clients, max(options.processes, len(ports)))
    loads = [
        Load(
            port=ports[index % len(ports)],
            model=model,
            clients=len(range(index, clients, processes)),
            prompts=prompts[index::processes],
            max_tokens=options.max_tokens,
            seconds=options.seconds,
        )
        for index in range(processes)
    ]
    return record(*run_loads(loads))


def record(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Raises `SystemExit` if a request failed."""
    if errors := sorted({sample.error for sample in samples if sample.error}):
        raise SystemExit("requests failed: " + "; ".join(errors))
    values = {
        "ttft_ms": [sample.time_to_first_token * 1e3 for sample in samples if sample.time_to_first_token],
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
def started(options: argparse.Namespace, num_gateways: int) -> Iterator[tuple[list[int], int]]:
    """Start an engine with random weights and gateways. Yields the gateways' ports and the vocabulary's size."""
    from support.processes import engine_process, gateway_process

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = write_model(options.model, scratch)
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        write_tokenizer(scratch, vocab_size)
        arguments = [f"--model={folder}", f"--tokenizer={scratch}", "--served-model-name=model"]
        arguments += [] if has_weights(folder) else ["--load-format=dummy"]
        arguments += [f"--max-model-len={options.max_model_len}"]
        arguments += [f"--quantization={options.quantization}"] if options.quantization else []
        arguments += ["--enforce-eager"] if options.enforce_eager else []
        _, address = stack.enter_context(engine_process(*arguments))
        yield [stack.enter_context(gateway_process(address))[1] for _ in range(num_gateways)], vocab_size


def texts(clients: int) -> list[Prompt]:
    draw = random.Random(clients)
    count = clients * _TEXT_TURNS
    return [f"Number {draw.randrange(10**6)}. Tell me about {draw.choice(_SUBJECTS)}." for _ in range(count)]


def records(options: argparse.Namespace, sizes: Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the workloads; yields each one's name and record."""
    shapes = {name: tuple(map(int, name.removeprefix("http-").split("x"))) for name in options.workloads}
    if options.url:
        ports = [urlsplit(url).port or 80 for url in options.url]
        for name, (clients, _) in shapes.items():
            yield name, measure(ports, clients, texts(clients), options)
        return
    options.max_tokens = sizes.closed[1]
    with started(options, max(gateways for _, gateways in shapes.values())) as (ports, vocab_size):
        for name, (clients, gateways) in shapes.items():
            prompts: list[Prompt] = [job.prompt for job in closed_jobs(clients, vocab_size, sizes)]
            yield name, measure(ports[:gateways], clients, prompts, options)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", help="URL of a gateway on this machine, may be repeated")
    parser.add_argument("--model", default="Qwen3-0.6B", help=f"model to start: {', '.join(SHAPES)}, or a folder")
    parser.add_argument("--quantization")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--enforce-eager", action="store_true", help="start the engine without CUDA graphs")
    parser.add_argument("--workloads", nargs="+", default=["http-64x1"], metavar="NAME")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of a request, with --url")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of one workload")
    parser.add_argument(
        "--processes", type=int, default=max(2, (os.cpu_count() or 2) // 2), help="number of client processes"
    )
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
        print(f"{name}: {figures['value']:,.1f} tokens/s; {shown}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
