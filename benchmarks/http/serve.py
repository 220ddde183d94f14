"""Throughput and latencies over HTTP with a closed loop of streaming clients, for the GPU report.

Starts an engine with random weights and gateways. The prompts are the same tokens as in `closed-C` of `speed`, so the
difference of the two results is the cost of HTTP. The clients are those of `proa bench serve`, in processes of 32.

    PYTHONPATH=tests python -m benchmarks.http.serve --model Qwen3-0.6B --workloads http-64x1 http-256x2

- `serve-start`: seconds from the start of `proa-engine serve` until its gRPC health service says that it is loaded; a
  cold start if TRITON_CACHE_DIR is empty.
- `http-CxG`: C clients, G gateways. Reports percentiles of milliseconds to the first token and between chunks, how many
  chunks came, and the cores that the busiest process of clients used: with 0.8 and more it may be what is measured.
- `own-http-CxG`: the same, sampled as the model's generation_config.json says.

With --url nothing is started: what serves there gets the same requests from the same clients, for example vLLM with the
folder that `python -m benchmarks.real_shapes Qwen3-0.6B FOLDER` writes:

    vllm serve FOLDER --load-format dummy --served-model-name model --max-model-len 16384 --api-server-count 2
    python -m benchmarks.http.serve --model Qwen3-0.6B --url http://127.0.0.1:8000 --workloads http-256x1
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

from benchmarks.engine.bench import FULL, OWN, PLAIN, SMALL, Sizes, closed_jobs, own_sampling, vocab_size
from benchmarks.http.closed_loop import Clients, Outcome, percentile, run_processes
from benchmarks.real_shapes import SHAPES, has_weights, write_model, write_tokenizer
from benchmarks.records import Recording

START = "serve-start"
_MODEL = "model"
_PERCENTILES = (0.5, 0.9, 0.99)
_CLIENTS_OF_A_PROCESS = 32
_BUSY_CLIENT = 0.8  # cores, as in `proa bench serve`


def record(outcome: Outcome) -> dict[str, Any]:
    """Raises `SystemExit` if a request failed."""
    samples = outcome.samples
    if errors := sorted({sample.error for sample in samples if sample.error}):
        raise SystemExit("requests failed: " + "; ".join(errors))
    values = {
        "ttft_ms": [sample.ttft * 1e3 for sample in samples],
        "inter_token_ms": [gap * 1e3 for sample in samples for gap in sample.gaps],
    }
    tokens = sum(sample.output_tokens for sample in samples)
    seconds = max(each.start + each.latency for each in samples) - min(each.start for each in samples)
    latencies = {
        f"{name}_p{round(share * 100)}": round(percentile(each, share), 2)
        for name, each in values.items()
        for share in _PERCENTILES
    }
    figures = {"value": tokens / seconds, "unit": "tokens/s", "requests": len(samples)} | latencies
    figures |= {"chunks": sum(sample.chunks for sample in samples), "client_cpu": round(outcome.cpu, 2)}
    return figures | ({"note": "the clients may be the limit"} if outcome.cpu >= _BUSY_CLIENT else {})


@contextmanager
def started(
    options: argparse.Namespace, folder: Path, tokenizer: Path, gateways: int
) -> Iterator[tuple[list[str], float]]:
    """Start an engine with random weights and gateways. Yields the gateways' URLs and the seconds that the engine
    took."""
    from support.processes import engine_process, gateway_process

    with ExitStack() as stack:
        arguments = [f"--model={folder}", f"--tokenizer={tokenizer}", f"--served-model-name={_MODEL}"]
        arguments += [] if has_weights(folder) else ["--load-format=dummy"]
        arguments += [f"--max-model-len={options.max_model_len}"]
        arguments += [f"--quantization={options.quantization}"] if options.quantization else []
        arguments += ["--enforce-eager"] if options.enforce_eager else []
        began = time.monotonic()
        _, address = stack.enter_context(engine_process(*arguments))
        seconds = time.monotonic() - began
        ports = [stack.enter_context(gateway_process(address))[1] for _ in range(gateways)]
        yield [f"http://127.0.0.1:{port}" for port in ports], seconds


def records(options: argparse.Namespace, sizes: Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the workloads; yields each one's name and record."""
    names = [name for name in options.workloads if name != START]
    shapes = {name: tuple(map(int, name.removeprefix(OWN).removeprefix("http-").split("x"))) for name in names}
    most = max((gateways for _, gateways in shapes.values()), default=0)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = write_model(options.model, scratch)
        config = json.loads((folder / "config.json").read_text())
        write_tokenizer(scratch, vocab_size(config))
        urls = options.url
        if not urls:
            urls, seconds = stack.enter_context(started(options, folder, scratch, most))
            if START in options.workloads:
                yield START, {"value": seconds, "unit": "s"}
        for name, (number, gateways) in shapes.items():
            prompts = [job.prompt for job in closed_jobs(number, vocab_size(config), sizes)]
            sampling = own_sampling(config) if name.startswith(OWN) else PLAIN
            clients = Clients(urls[:gateways], _MODEL, number, prompts, sizes.closed[1], options.seconds, sampling)
            yield name, record(run_processes(clients, -(-number // _CLIENTS_OF_A_PROCESS)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B", help=f"model to start: {', '.join(SHAPES)}, or a folder")
    parser.add_argument("--url", nargs="+", default=[], help="servers that run already and serve it as `model`")
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
    recording = Recording(options.json, arguments=list(argv))
    for name, figures in records(options, SMALL if options.small else FULL):
        recording.add(name, figures)
        shown = ", ".join(f"{key} {value:,}" for key, value in figures.items() if key not in ("value", "unit"))
        print(f"{name}: {figures['value']:,.1f} {figures['unit']} {shown}".rstrip(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
