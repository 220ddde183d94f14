"""The engine alone, offline, on the workloads that engines are compared by; random weights of a real model's shape.

    python tests/benchmarks/engine.py --model Llama-3.1-8B --quantization fp8 --json figures.json

- `mixed`: 256 requests, prompts and outputs of 100 to 1,024 tokens, uniform; output tokens a second, prefill included.
- `decode-B`: B requests after prompts of 512 tokens; milliseconds a step, over 96 steps.
- `prefill-NxL`: N prompts of L tokens; milliseconds until each has its first token, median of five.
- `start`: seconds from a new process to a loaded, warmed-up engine, with Triton's cache empty.

Sampled at temperature 0.6, ends of text ignored, prompts random and never repeated, prefix caching on.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real_shapes import SHAPES, write_model

DECODE_BATCHES = (1, 8, 32, 64, 128, 256)
PREFILLS = ((1, 1024), (1, 8192), (32, 1024), (8, 8192))
CONTEXT = 512
DECODE_STEPS = 96
PREFILL_ROUNDS = 5
WORKLOADS = (
    "start",
    "mixed",
    *(f"decode-{batch}" for batch in DECODE_BATCHES),
    *(f"prefill-{count}x{length}" for count, length in PREFILLS),
)
_UNITS = {"mixed": "tokens/s", "decode": "ms a step", "prefill": "ms", "start": "s"}


class Bench:
    """One loaded engine and a supply of fresh prompts."""

    def __init__(self, folder: Path, engine_arguments: dict[str, Any], *, vocab_size: int) -> None:
        from proa_engine import LLM

        self._llm = LLM(str(folder), **engine_arguments)
        self._engine = self._llm.llm_engine
        self._random = random.Random(0)
        self._vocab_size = vocab_size
        self._num_requests = 0

    def mixed(self) -> float:
        """Output tokens a second."""
        lengths = [(self._random.randint(100, 1024), self._random.randint(100, 1024)) for _ in range(256)]
        self._add([(prompt, 8) for prompt, _ in lengths[:16]])
        self._drain()
        self._add(lengths)
        seconds = _timed(self._drain)
        return sum(output for _, output in lengths) / seconds

    def decode(self, batch: int) -> float:
        """Milliseconds a step."""
        with self.decoding(batch):
            seconds = _timed(lambda: self.step(DECODE_STEPS))
        return seconds / DECODE_STEPS * 1e3

    @contextmanager
    def decoding(self, batch: int) -> Iterator[None]:
        """So many requests past their prompts, with tokens left for DECODE_STEPS steps."""
        names = self._add([(CONTEXT, DECODE_STEPS + 64)] * batch)
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}
        self.step(8)
        yield
        self._engine.abort_request(names)
        self._drain()

    def step(self, count: int) -> None:
        for _ in range(count):
            self._engine.step(only_finished=True)

    def prefill(self, count: int, length: int) -> float:
        """Milliseconds until each prompt has its first token."""
        rounds = [self.prefill_once(count, length) for _ in range(1 + PREFILL_ROUNDS)]
        return statistics.median(rounds[1:]) * 1e3

    def prefill_once(self, count: int, length: int) -> float:
        """Seconds."""
        self._add([(length, 1)] * count)
        return _timed(self._drain)

    def run(self, workload: str) -> float:
        kind, _, size = workload.partition("-")
        if kind == "mixed":
            return self.mixed()
        if kind == "decode":
            return self.decode(int(size))
        count, length = map(int, size.split("x"))
        return self.prefill(count, length)

    def _add(self, lengths: Sequence[tuple[int, int]]) -> list[str]:
        """Queue requests by their lengths of prompt and output; their names."""
        from proa_engine import SamplingParams

        names = []
        for prompt, output in lengths:
            self._num_requests += 1
            names.append(str(self._num_requests))
            token_ids = [self._random.randrange(self._vocab_size) for _ in range(prompt)]
            params = SamplingParams(temperature=0.6, max_tokens=output, ignore_eos=True, detokenize=False)
            self._engine.add_request(names[-1], {"prompt_token_ids": token_ids}, params)
        return names

    def _drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step(only_finished=True)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def start_seconds(argv: Sequence[str]) -> float:
    """From a new process to a loaded engine, nothing compiled before."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, __file__, *argv, "--workloads"]
        return _timed(lambda: subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL))


def figures(arguments: argparse.Namespace, argv: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Each workload's figure as it is known."""
    workloads = list(arguments.workloads)
    if "start" in workloads:
        workloads.remove("start")
        yield "start", start_seconds(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(arguments.model, Path(folder))
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        bench = Bench(model, engine_arguments(arguments), vocab_size=vocab_size)
        for workload in workloads:
            yield workload, bench.run(workload)


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    chosen = {
        "load_format": "dummy" if arguments.model in SHAPES else "auto",
        "skip_tokenizer_init": True,
        "max_model_len": arguments.max_model_len,
        "tensor_parallel_size": arguments.tensor_parallel_size,
    }
    optional = {"quantization": arguments.quantization, "kv_cache_dtype": arguments.kv_cache_dtype}
    return chosen | {name: value for name, value in optional.items() if value is not None}


def machine() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    triton = getattr(__import__("triton"), "__version__", "none")
    return f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}, triton {triton}"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B", help=f"{', '.join(SHAPES)}, or a model's folder")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=WORKLOADS, metavar="NAME", help=" ")
    parser.add_argument("--json", type=Path, help="write the figures to this file as they come")
    return parser


def main(argv: Sequence[str]) -> None:
    arguments = parser().parse_args(argv)
    without_workloads = [f"--model={arguments.model}", f"--max-model-len={arguments.max_model_len}"]
    without_workloads += [f"--tensor-parallel-size={arguments.tensor_parallel_size}"]
    without_workloads += [f"--quantization={arguments.quantization}"] if arguments.quantization else []
    without_workloads += [f"--kv-cache-dtype={arguments.kv_cache_dtype}"] if arguments.kv_cache_dtype else []
    record: dict[str, Any] = {"model": arguments.model, "arguments": list(argv), "machine": machine(), "figures": {}}
    print(f"{arguments.model}: {record['machine']}\n\n| workload | figure | |\n|---|---:|---|", flush=True)
    for workload, figure in figures(arguments, without_workloads):
        record["figures"][workload] = figure
        print(f"| {workload} | {figure:,.2f} | {_UNITS[workload.partition('-')[0]]} |", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
