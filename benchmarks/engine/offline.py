"""Compare `LLM` with `transformers.generate`: same model, prompts, threads and number of tokens, in one run.

Greedy, float32, each output exactly `--max-tokens` long. Prefix caching is off, because rounds repeat their prompts.
Rounds of the two alternate and the best of each counts, to reduce the effect of other processes.

    python -m benchmarks.engine.offline --model builtin
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_QUESTIONS = (
    "What is 3 plus 4?",
    "Tell me about a small boat on the sea.",
    "Who are you?",
    "Answer in JSON: what colour is the sky, and what colour is grass?",
    "What do birds do in the morning, and why do people like to hear them?",
    "Name a fruit.",
)

Generate = Callable[[list[list[int]]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Figure:
    """Results of one batch size: output tokens per second, and how many outputs were equal."""

    batch: int
    proa_tokens_per_second: float
    transformers_tokens_per_second: float
    ratio: float
    equal_outputs: int


def make_proa(model: str, max_tokens: int) -> Generate:
    from proa_engine import LLM, SamplingParams

    llm = LLM(model, dtype="float32", enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def make_transformers(folder: str, max_tokens: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, use_cache=True, pad_token_id=0
            )
        return [row.tolist() for row in out[:, width:]]

    return generate


def make_prompts(folder: str, count: int) -> list[list[int]]:
    """Distinct prompts of mixed length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    texts = [f"{index}. " + " ".join(_QUESTIONS[: 1 + index % len(_QUESTIONS)]) for index in range(count)]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def compare(proa: Generate, transformers: Generate, prompts: list[list[int]], rounds: int) -> Figure:
    sides = (proa, transformers)
    best = [float("inf"), float("inf")]
    outputs: list[list[list[int]]] = [[], []]
    for _ in range(rounds):
        for side, generate in enumerate(sides):
            started = time.perf_counter()
            outputs[side] = generate(prompts)
            best[side] = min(best[side], time.perf_counter() - started)
    tokens = sum(map(len, outputs[0]))
    assert tokens == sum(map(len, outputs[1])), "the two made different numbers of tokens"
    return Figure(
        batch=len(prompts),
        proa_tokens_per_second=round(tokens / best[0], 1),
        transformers_tokens_per_second=round(tokens / best[1], 1),
        ratio=round(best[1] / best[0], 2),
        equal_outputs=sum(a == b for a, b in zip(*outputs, strict=True)),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin", help="model directory, or builtin")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    arguments = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read when torch is imported
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"

    import torch

    from proa_engine.sources.resolve import resolve_model

    torch.set_num_threads(arguments.threads)
    folder = str(resolve_model(arguments.model, None, "auto"))
    transformers = make_transformers(folder, arguments.max_tokens)
    proa = make_proa(arguments.model, arguments.max_tokens)
    print(
        f"{platform.machine()}, {arguments.threads} threads, torch {torch.__version__}, {arguments.max_tokens} tokens"
    )
    print("\n| prompts at once | Proa, tokens/s | transformers, tokens/s | ratio | equal outputs |")
    print("|---:|---:|---:|---:|---:|")
    figures = []
    for batch in arguments.batch:
        figure = compare(proa, transformers, make_prompts(folder, batch), arguments.rounds)
        figures.append(asdict(figure))
        row = [figure.batch, f"{figure.proa_tokens_per_second:,}", f"{figure.transformers_tokens_per_second:,}"]
        print("|", " | ".join(map(str, [*row, figure.ratio, f"{figure.equal_outputs}/{batch}"])), "|", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
