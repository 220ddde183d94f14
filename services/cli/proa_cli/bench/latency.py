"""`proa bench latency`: seconds for one batch in the engine, in this process."""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from proa.options import REQUIRED, check_options, option
from proa_cli.bench.offline import OutputOptions, load, run
from proa_engine.config import EngineConfig

PERCENTAGES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """Prompts are random tokens. All iterations have the same."""

    input_len: int = option(32, "tokens of each prompt", minimum=1)
    output_len: int = option(128, "tokens of each output", minimum=1)
    batch_size: int = option(8, "prompts at once", minimum=1)
    num_iters_warmup: int = option(10, "iterations before the measured ones", minimum=0)
    num_iters: int = option(30, "measured iterations", minimum=1)
    outputs: OutputOptions = option(OutputOptions(), "outputs")
    config: EngineConfig = option(REQUIRED, "engine")

    def __post_init__(self) -> None:
        check_options(self)


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Prefix caching is off if no flag says otherwise: an iteration would find the prompts of the one before."""
    return run(parser, words, LatencyOptions, _measure, enable_prefix_caching=False)


def _measure(options: LatencyOptions) -> None:
    llm = load(options.config, options.batch_size * options.outputs.n)
    vocabulary, draw = range(llm.llm_engine.limits.vocab_size), random.Random(options.config.seed)
    prompts = [draw.choices(vocabulary, k=options.input_len) for _ in range(options.batch_size)]
    params = options.outputs.params(options.output_len)

    def iterate() -> float:
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    for _ in tqdm(range(options.num_iters_warmup), desc="Warmup iterations"):
        iterate()
    figures = results([iterate() for _ in tqdm(range(options.num_iters), desc="Bench iterations")])
    print(f"Avg latency: {figures['avg_latency']} seconds")
    print(f"Std latency: {figures['std_latency']} seconds")
    for percentage, value in figures["percentiles"].items():
        print(f"{percentage}% percentile latency: {value} seconds")
    options.outputs.write(figures)


def results(seconds: Sequence[float]) -> dict[str, Any]:
    """The results under vLLM's keys, of the seconds of each iteration."""
    return {
        "avg_latency": float(np.mean(seconds)),
        "std_latency": float(np.std(seconds)),
        "latencies": list(seconds),
        "percentiles": {each: float(np.percentile(seconds, each)) for each in PERCENTAGES},
    }
