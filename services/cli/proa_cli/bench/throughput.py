"""`proa bench throughput`: tokens a second of many prompts in the engine, in this process."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from proa.options import REQUIRED, option
from proa_cli.bench.offline import OutputOptions, load, run
from proa_cli.bench.options import DatasetOptions
from proa_cli.bench.prompts import make_prompts
from proa_cli.bench.tokens import read_tokenizer
from proa_engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """The engine's seed is also that of the prompts."""

    dataset: DatasetOptions = option(DatasetOptions(), "prompts")
    outputs: OutputOptions = option(OutputOptions(), "outputs")
    config: EngineConfig = option(REQUIRED, "engine")


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    return run(parser, words, ThroughputOptions, _measure)


def _measure(options: ThroughputOptions) -> None:
    config, dataset = options.config, options.dataset
    is_plain = dataset.dataset_name == "custom" and dataset.skip_chat_template
    tokenizer = None if is_plain else read_tokenizer(config.tokenizer or config.model)
    prompts = make_prompts(replace(dataset, seed=config.seed), tokenizer)
    llm = load(config, len(prompts) * options.outputs.n)
    params = [options.outputs.params(prompt.output_tokens) for prompt in prompts]
    started = time.perf_counter()
    outputs = llm.generate([prompt.text for prompt in prompts], params)
    seconds = time.perf_counter() - started
    num_inputs = sum(len(output.prompt_token_ids) for output in outputs)
    num_outputs = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    figures = results(seconds, len(prompts), num_inputs, num_outputs)
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total "
        f"tokens/s, {num_outputs / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_inputs}")
    print(f"Total num output tokens:  {num_outputs}")
    options.outputs.write(figures)


def results(seconds: float, num_requests: int, num_inputs: int, num_outputs: int) -> dict[str, float]:
    """The results under vLLM's keys. `num_inputs` and `num_outputs` are tokens."""
    return {
        "elapsed_time": seconds,
        "num_requests": num_requests,
        "total_num_tokens": num_inputs + num_outputs,
        "requests_per_second": num_requests / seconds,
        "tokens_per_second": (num_inputs + num_outputs) / seconds,
    }
