"""What grammars cost: masks of a step without a model, compiling, and the throughput of the built-in model; and what
forced tokens save.

Times of one step's masks are for rows in random states of a tool-like JSON, which follow random tokens of their masks.
Rounds of constrained and plain batches alternate, all requests of exactly `--max-tokens` tokens. The best of each are
compared, and the two of each round. `CPU` is processor time of all threads, on which other processes have less effect.

    PYTHONPATH=tests python -m benchmarks.engine.grammars
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from proa.contract import EngineCoreRequest, Grammar, SamplingParams, StructuredOutputsParams
from proa.grammar import lower
from proa_engine import LLM
from proa_engine.core.grammar import GrammarCursor, GrammarReady, MaskedSample
from proa_engine.grammar import NO_LIMITS, GrammarTokenizer, LLGuidanceGrammars, make_tokenizer
from proa_engine.memory.host import available_cores

BUILTIN = Path(__file__).parents[2] / "engine/proa_engine/builtin/model/tokenizer.json"
CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["get_weather", "search", "send_mail"]},
        "arguments": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer", "minimum": 1, "maximum": 100},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
                "options": {"type": "object", "additionalProperties": {"type": "number"}},
            },
            "required": ["query", "limit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
}
ENDLESS = {"type": "array", "items": CALL, "minItems": 100_000}
WEATHER = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather"},
        "arguments": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
REPORT_KEYS = ["number_of_registered_customers", "average_monthly_revenue_in_euros", "customer_satisfaction_percentage"]
REPORT = {
    "type": "object",
    "properties": {key: {"type": "integer", "maximum": 9999} for key in REPORT_KEYS},
    "required": REPORT_KEYS,
    "additionalProperties": False,
}
OPTIONAL = {"type": "object", "properties": {f"key {index}": {"type": "string"} for index in range(2000)}}
COMPILED: dict[str, str] = {
    "a tool's arguments": json.dumps(CALL),
    "enum of 15,000 values": json.dumps({"enum": [f"value {index}" for index in range(15_000)]}),
    "2,000 optional properties": json.dumps(OPTIONAL),
    "200 references": json.dumps(
        {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{(i + 1) % 200}"}} for i in range(200)}}
    ),
}
HOSTILE = {
    "((a{1,100}){1,100}){1,100}": "start: /((a{1,100}){1,100}){1,100}/",
    ".*a.{1000}": "start: /.*a.{1000}/",
    'Lark (("a"{1,300}){1,300}){1,300}': 'start: (("a"{1,300}){1,300}){1,300}',
    "7,900 repetitions in a terminal": "start: A\nA: " + '"x"? ' * 7900,
}


def synthetic_tokenizer(num_tokens: int) -> bytes:
    """A byte-level BPE of words of random letters and of all their beginnings."""
    from tokenizers import pre_tokenizers

    rng = random.Random(0)
    vocab = {token: index for index, token in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = []
    while len(vocab) < num_tokens:
        token = rng.choice(["Ġ", "", "", '"', "_", "1", "Ã"])
        for letter in rng.choices("etaoinshrdlucmfwygpbvk0123456789._", range(34, 0, -1), k=rng.randint(2, 9)):
            if token and token + letter not in vocab and len(vocab) < num_tokens:
                vocab[token + letter] = len(vocab)
                merges.append([token, letter])
            token += letter
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": 0, "content": "<eos>", "special": True}
                | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            ],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        }
    ).encode()


def json_grammar(schema: object) -> str:
    return lower(StructuredOutputsParams(json=schema), {}).grammar.text  # type: ignore[arg-type]


def prepare(grammars: LLGuidanceGrammars, text: str) -> GrammarReady:
    answers: SimpleQueue[GrammarReady] = SimpleQueue()
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(grammar=Grammar(text=text))
    )
    cursor = grammars.prepare(request, answers.put, lambda: True)
    return answers.get() if cursor is None else GrammarReady("r", cursor)


def make_grammars(tokenizer: GrammarTokenizer, rows: int) -> LLGuidanceGrammars:
    return LLGuidanceGrammars(
        tokenizer,
        tokenizer.eos_tokens,
        max_samples=rows,
        make_buffer=lambda num_bytes: memoryview(bytearray(num_bytes)),
        num_threads=max(available_cores() // 2, 1),
        limits=NO_LIMITS,
    )


def random_token(mask: Any, rng: random.Random) -> int:
    word = int(rng.choice(mask.nonzero()[0]))
    return word * 32 + rng.choice([bit for bit in range(32) if int(mask[word]) >> bit & 1])


def step_times(grammars: LLGuidanceGrammars, rows: int, steps: int) -> Iterator[tuple[float, float, float]]:
    """Seconds to fill the masks of a step, its processor time, and seconds to accept the step's tokens."""
    rng, text = random.Random(1), json_grammar(ENDLESS)
    cursors: list[GrammarCursor] = []
    while len(cursors) < rows:
        cursor = prepare(grammars, text).cursor
        assert cursor is not None
        cursors.append(cursor)
    for _ in range(steps):
        started, started_cpu = time.perf_counter(), time.process_time()
        masks = grammars.fill([MaskedSample(row, 0, cursor) for row, cursor in enumerate(cursors)])
        filled, filled_cpu = time.perf_counter() - started, time.process_time() - started_cpu
        assert masks is not None
        words = np.frombuffer(masks.bits, np.uint32).reshape(rows, -1)
        tokens = [random_token(mask, rng) for mask in words]
        started = time.perf_counter()
        assert all(cursor.accept(token) for cursor, token in zip(cursors, tokens, strict=True))
        yield filled, filled_cpu, time.perf_counter() - started


def measure_steps(name: str, tokenizer: GrammarTokenizer, steps: int) -> None:
    for rows in (1, 8, 64, 256):
        grammars = make_grammars(tokenizer, rows)
        times = list(step_times(grammars, rows, steps))[steps // 10 :]
        fills, fills_cpu, accepts = ([1e6 * each for each in column] for column in zip(*times, strict=True))
        print(
            f"{name}, {rows} rows: fill median {statistics.median(fills):.0f} us, "
            f"p99 {statistics.quantiles(fills, n=100)[98]:.0f}, CPU mean {statistics.mean(fills_cpu):.0f}, "
            f"median {statistics.median(fills_cpu):.0f}; accept median {statistics.median(accepts):.0f} us",
            flush=True,
        )
        grammars.close()


def measure_compiling(name: str, tokenizer: GrammarTokenizer) -> None:
    grammars = make_grammars(tokenizer, 1)
    for title, text in ({key: json_grammar(schema) for key, schema in COMPILED.items()} | HOSTILE).items():
        started = time.perf_counter()
        ready = prepare(grammars, text)
        print(
            f"{name}, {title}: {1e3 * (time.perf_counter() - started):.1f} ms, {ready.error or 'compiled'}", flush=True
        )
    grammars.close()


def measure_throughput(rows: int, max_tokens: int, rounds: int) -> None:
    llm = LLM("builtin", dtype="float32", max_num_seqs=rows, max_model_len=max_tokens + 64)
    plain = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed) for seed in range(rows)]
    grammar = Grammar(text=json_grammar(ENDLESS))
    constrained = [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed, grammar=grammar) for seed in range(rows)
    ]
    quarter = [*constrained[: rows // 4], *plain[rows // 4 :]]
    batches = {"plain": plain, "constrained": constrained, "a quarter constrained": quarter}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in batches}
    for _ in range(rounds):
        for name, params in batches.items():
            started, started_cpu = time.perf_counter(), time.process_time()
            outputs = llm.generate(["Hello"] * rows, params, use_tqdm=False)
            seconds[name].append((time.perf_counter() - started, time.process_time() - started_cpu))
            assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    for name, rounds_of in seconds.items():
        (wall, cpu), (plain_wall, plain_cpu) = (list(zip(*each, strict=True)) for each in (rounds_of, seconds["plain"]))
        more, more_cpu = min(plain_wall) / min(wall) - 1, min(plain_cpu) / min(cpu) - 1
        typical = statistics.median(plain / each for plain, each in zip(plain_wall, wall, strict=True)) - 1
        print(
            f"built-in model, {rows} rows, {name}: {rows * max_tokens / min(wall):.0f} tok/s, {more:+.1%}; "
            f"median of rounds {typical:+.1%}; CPU {more_cpu:+.1%}",
            flush=True,
        )
    llm.llm_engine.shutdown()


def measure_forced(rows: int, max_tokens: int, rounds: int) -> None:
    """Steps and seconds with forced tokens sampled one by one, and computed in one step. The tokens are the same."""
    llm = LLM("builtin", dtype="float32", max_num_seqs=rows, max_model_len=max_tokens + 64)
    core = llm.llm_engine._core
    factory = core._scheduler._factory
    counter = factory.forced
    for name, schema in {"strings": CALL, "a tool's arguments": WEATHER, "long keys": REPORT}.items():
        grammar = Grammar(text=json_grammar({"type": "array", "items": schema, "minItems": 100_000}))
        params = [
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed, grammar=grammar) for seed in range(rows)
        ]
        steps, forced = dict[bool, int](), dict[bool, int]()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        tokens = list[Any]()
        for _ in range(rounds):
            for computes in (False, True):
                factory._config = replace(factory._config, compute_forced_tokens=computes)
                num_steps, num_forced, started = core._num_steps, counter.num_tokens, time.perf_counter()
                outputs = llm.generate(["Hello"] * rows, params, use_tqdm=False)
                seconds[computes].append(time.perf_counter() - started)
                steps[computes], forced[computes] = core._num_steps - num_steps, counter.num_tokens - num_forced
                tokens.append([output.outputs[0].token_ids for output in outputs])
        assert all(each == tokens[0] for each in tokens)
        before, after = (rows * max_tokens / min(seconds[computes]) for computes in (False, True))
        print(
            f"built-in model, {rows} rows, {name}: {forced[True] / rows / max_tokens:.0%} forced, "
            f"{steps[False]} -> {steps[True]} steps, {before:.0f} -> {after:.0f} tok/s, x{after / before:.2f}",
            flush=True,
        )
    llm.llm_engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--num-tokens", type=int, default=151_936, help="size of the synthetic vocabulary")
    options = parser.parse_args()
    for rows in (1, 8, 64, 256):
        measure_throughput(rows, options.max_tokens, options.rounds)
    for rows in (1, 64):
        measure_forced(rows, options.max_tokens, options.rounds)
    for name, data in (("2,048 tokens", BUILTIN.read_bytes()), ("synthetic", synthetic_tokenizer(options.num_tokens))):
        started = time.perf_counter()
        tokenizer = make_tokenizer(data, vocab_size=1, eos_token_ids=[2])
        assert tokenizer is not None
        print(f"{name}: {tokenizer.vocab_size} tokens, tokenizer made in {time.perf_counter() - started:.2f} s")
        measure_compiling(name, tokenizer)
        measure_steps(name, tokenizer, options.steps)


if __name__ == "__main__":
    main()
