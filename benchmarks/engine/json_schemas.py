"""What `proa.grammar` takes of published JSON schemas, whether it accepts the right instances, and how long it takes.

    python -m benchmarks.engine.json_schemas FOLDER [--limit N]

FOLDER holds JSON files as MaskBench (github.com/guidance-ai/jsonschemabench, maskbench/data) has them: an object with a
"schema" and "tests", each of which has "data" and whether it is "valid". Every schema is lowered with `strict`.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from proa.contract import StructuredOutputsParams
from proa.grammar import GrammarError, check, lower

LIMITS = LLParserLimits(max_lexer_states=30_000, verbose_errors=False)


@dataclass(slots=True)
class Results:
    refused: Counter[str] = field(default_factory=Counter)  # reason -> schemas
    lower_ms: list[float] = field(default_factory=list)
    check_ms: list[float] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    instances: Counter[bool] = field(default_factory=Counter)  # valid -> instances
    wrong: list[tuple[bool, str]] = field(default_factory=list)  # valid, name of the file
    uncompiled: list[str] = field(default_factory=list)  # taken, but refused with a tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=None)
    options = parser.parse_args()
    results = Results()
    tokenizer = LLTokenizer("byte")
    for path in sorted(options.folder.glob("*.json"))[: options.limit]:
        measure(path, tokenizer, results)
    show(results)


def measure(path: Path, tokenizer: LLTokenizer, results: Results) -> None:
    case = json.loads(path.read_text())
    try:
        start = time.perf_counter()
        grammar = lower(StructuredOutputsParams(json=case["schema"]), {}, strict=True).grammar
        lowered = time.perf_counter()
        check(grammar.text)
    except GrammarError as error:
        results.refused[str(error)[:45]] += 1
        return
    results.lower_ms.append((lowered - start) * 1000)
    results.check_ms.append((time.perf_counter() - lowered) * 1000)
    start = time.perf_counter()
    matcher = LLMatcher(tokenizer, grammar.text, log_level=0, limits=LIMITS)
    results.compile_ms.append((time.perf_counter() - start) * 1000)
    if matcher.is_error():
        results.uncompiled.append(path.name)
        return
    for test in case["tests"]:
        results.instances[test["valid"]] += 1
        text = json.dumps(test["data"], ensure_ascii=False).encode("utf-8", "surrogatepass")
        accepted = matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
        if accepted != test["valid"]:
            results.wrong.append((test["valid"], path.name))
        matcher.reset()


def show(results: Results) -> None:
    num_taken, num_refused = len(results.check_ms), results.refused.total()
    print(f"schemas taken {num_taken}, refused {num_refused}, taken but not compiled {len(results.uncompiled)}")
    for reason, count in results.refused.most_common(20):
        print(f"  {count:5} {reason}")
    for valid, name in ((False, "invalid instances accepted"), (True, "valid instances rejected")):
        wrong = [file for is_valid, file in results.wrong if is_valid is valid]
        print(f"{name}: {len(wrong)} of {results.instances[valid]} {wrong[:5]}")
    for name, times in (("lower", results.lower_ms), ("check", results.check_ms), ("compile", results.compile_ms)):
        print(f"{name} ms: p50 {quantile(times, 0.5)}, p99 {quantile(times, 0.99)}, max {quantile(times, 1.0)}")


def quantile(values: Sequence[float], share: float) -> str:
    return f"{sorted(values)[int(share * (len(values) - 1))]:.1f}" if values else "-"


if __name__ == "__main__":
    main()
