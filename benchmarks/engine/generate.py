"""Workloads of `speed` through `LLM.generate`, which vLLM has too: one program and one clock for both engines.

    python -m benchmarks.engine.generate --package vllm --model Llama-3.1-8B --json vllm.json
    python -m benchmarks.engine.generate --package proa_engine --model Llama-3.1-8B --json proa.json

- `start`: seconds from the start of the process to a warmed-up engine.
- `mixed`: the requests of same_work.json at once; output tokens/s, median of three runs.
- `decode-B`: B requests whose prompts are in the prefix cache, with few outputs and with 128 more; milliseconds a step,
  the difference divided by 128, median of three.
- `prefill-NxL`: N prompts of L tokens; milliseconds until `generate` returns one output of each, median of three.
- `own-…`: the same workload, sampled as the model's generation_config.json says.

Prompts are random, each new to the prefix cache but for those of a decode. The engine's settings are its defaults, but
for those of `--options`.
"""

import argparse
import importlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.engine.bench import (
    FULL,
    OWN,
    PLAIN,
    SMALL,
    Figure,
    Job,
    Sizes,
    median_figure,
    own_sampling,
    timed,
    vocab_size,
)
from benchmarks.engine.speed import machine, seconds_since_start
from benchmarks.real_shapes import SHAPES, has_weights, write_model
from benchmarks.records import Recording

PACKAGES = {"proa_engine": "proa-engine", "vllm": "vllm"}  # with the names of their distributions
WORKLOADS = ("start", "decode-1", "decode-64", "decode-256", "prefill-1x1024", "mixed")
_WARM_UP = ((8, 200, 32), (64, 300, 16))  # requests, tokens of each prompt and output


class Generating:
    """`engine`: a package with `LLM` and `SamplingParams`. `arguments` are those of `LLM`, `config` is the model's
    config.json."""

    def __init__(self, engine: Any, arguments: Mapping[str, Any], config: Mapping[str, Any], sizes: Sizes) -> None:
        self._params = engine.SamplingParams
        self._llm = engine.LLM(**arguments)
        self.ready = seconds_since_start()
        self._config, self._sizes = config, sizes
        self._sampling = PLAIN
        self._random = random.Random(0)
        for jobs in _WARM_UP if sizes is FULL else ():
            self._generate(self._jobs(*jobs))

    def run(self, workload: str) -> Figure:
        if workload == "start":
            return Figure(self.ready, "s")
        self._sampling = own_sampling(self._config) if workload.startswith(OWN) else PLAIN
        kind, _, size = workload.removeprefix(OWN).partition("-")
        if kind == "mixed":
            return self._mixed()
        if kind == "decode":
            return self._decode(int(size))
        assert kind == "prefill", workload
        return self._prefill(*map(int, size.split("x")))

    def _mixed(self) -> Figure:
        lengths = self._sizes.mixed
        rounds = range(self._sizes.rounds)
        seconds = [self._generate([self._job(*each) for each in lengths]) for _ in rounds]
        return median_figure([sum(outputs for _, outputs in lengths) / each for each in seconds], "tokens/s")

    def _decode(self, batch: int) -> Figure:
        before, steps = self._sizes.decode_after, self._sizes.decode_steps
        runs = []
        for _ in range(self._sizes.rounds):
            jobs = self._jobs(batch, self._sizes.context, 1)
            self._generate(jobs)
            few, many = (
                self._generate([Job(job.prompt, outputs) for job in jobs]) for outputs in (before, before + steps)
            )
            runs.append((many - few) / steps * 1e3)
        return median_figure(runs, "ms a step")

    def _prefill(self, count: int, length: int) -> Figure:
        runs = [self._generate(self._jobs(count, length, 1)) * 1e3 for _ in range(1 + self._sizes.rounds)]
        return median_figure(runs[1:], "ms")

    def _generate(self, jobs: Sequence[Job]) -> float:
        """Seconds."""
        prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
        options: dict[str, Any] = {"ignore_eos": True, "detokenize": False}
        params = [self._params(**self._sampling, **options, max_tokens=job.num_outputs) for job in jobs]
        return timed(lambda: self._llm.generate(prompts, params, use_tqdm=False))

    def _jobs(self, count: int, prompt: int, outputs: int) -> list[Job]:
        return [self._job(prompt, outputs) for _ in range(count)]

    def _job(self, prompt: int, outputs: int) -> Job:
        return Job(self._random.choices(range(vocab_size(self._config)), k=prompt), outputs)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=PACKAGES, default="proa_engine")
    parser.add_argument("--model", default="Qwen3-0.6B", help=f"{', '.join(SHAPES)}, or a model's folder")
    parser.add_argument("--quantization")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--options", default="{}", help="further arguments of LLM, as JSON")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, metavar="NAME", help=" ")
    parser.add_argument("--small", action="store_true", help="short lengths, only to check that everything runs")
    parser.add_argument("--json", type=Path, help="write the records to this file, after each workload")
    return parser


def main(argv: Sequence[str]) -> None:
    options = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(options.model, Path(scratch))
        arguments: dict[str, Any] = {
            "model": str(folder),
            "load_format": "auto" if has_weights(folder) else "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": options.max_model_len,
        }
        arguments |= {"quantization": options.quantization} if options.quantization else {}
        arguments |= json.loads(options.options)
        config = json.loads((folder / "config.json").read_text())
        sizes = SMALL if options.small else FULL
        generating = Generating(importlib.import_module(options.package), arguments, config, sizes)
        side = f"{options.package} {version(PACKAGES[options.package])}"
        recording = Recording(options.json, machine=f"{machine()}, {side}", arguments=list(argv))
        for workload in options.workloads:
            started = time.monotonic()
            figure = generating.run(workload)
            recording.add(workload, figure.record() | {"took": round(time.monotonic() - started, 1), "side": side})
            print(f"{workload}: {figure.value:,.2f} {figure.unit} ({side})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
