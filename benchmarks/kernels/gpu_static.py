"""What can be known of speed on a Hopper GPU without one, from kernels compiled for it.

    make gpu-static
    pip install --no-deps --target /tmp/triton triton==3.6.0
    make gpu-static PYTHONPATH=/tmp/triton

Compiles every kernel variant that real models launch (`support/compiled_kernels.py`) and reports of each: registers and
spilled bytes of a thread, shared memory, programs that a multiprocessor runs at once, asynchronous copies in flight in
the loops that multiply matrices, and the tensor core instructions. Then, for a model's steps, launches and bytes beside
the floor of `floors.py`. Writes kernels.json and report.md to a folder and prints the hot kernels.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from benchmarks.engine.floors import Card, Step, floor_seconds, parts
from benchmarks.kernels.static_steps import CONTEXT, WORKLOADS, StepCost, StepCounter
from benchmarks.real_shapes import SHAPES
from support.compiled_kernels import CASES, MORE_CASES, make_pool, users
from support.kernel_facts import KernelFacts, facts_of
from support.shape_models import INT8

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("Qwen3-0.6B", {}),
    "Llama-3.1-8B": ("Llama-3.1-8B", {}),
    "Llama-3.1-8B fp8": ("Llama-3.1-8B", {"quantization": "fp8"}),
    "Llama-3.1-8B int4": ("Llama-3.1-8B int4", {}),
    "Llama-3.1-8B int8": ("Llama-3.1-8B", {"hf_overrides": {"quantization_config": INT8}}),
    "Llama-3.1-8B nvfp4": ("Llama-3.1-8B nvfp4", {}),
    "Qwen3-30B-A3B": ("Qwen3-30B-A3B", {}),
    "Qwen3-30B-A3B int4": ("Qwen3-30B-A3B int4", {}),
    "Qwen3-30B-A3B nvfp4": ("Qwen3-30B-A3B nvfp4", {}),
    "gpt-oss-20b": ("gpt-oss-20b", {}),
}
H200 = Card(4.25e12, 799e12)
_KERNEL_TITLES = [
    *("kernel", "types", "constants", "registers", "spilled", "shared", "warps", "programs", "in-flight"),
    *("tensor-cores", "launched-by"),
]
_STEP_TITLES = [
    *("model", "step", "Triton", "torch", "outside-graphs", "floor-MB", "activations-MB", "floor-ms"),
    "activations-ms",
]

Use = tuple[KernelFacts, list[str]]  # a variant and the names of the cases that launch it


def compile_kernels() -> list[Use]:
    started = time.monotonic()
    all_cases = [*CASES, *MORE_CASES]
    say(started, f"finding the kernels of {len(all_cases)} engines")
    compiled: list[Use] = []
    with make_pool() as pool:
        names = users(all_cases, pool)
        for facts, cases in zip(pool.map(facts_of, names), names.values(), strict=True):
            compiled.append((facts, cases))
            if len(compiled) % 20 == 0 or len(compiled) == len(names):
                say(started, f"compiled {len(compiled)} of {len(names)} kernels")
    return compiled


def say(started: float, text: str) -> None:
    print(f"gpu-static: {time.monotonic() - started:4.0f} s: {text}", file=sys.stderr, flush=True)


def kernel_row(use: Use) -> list[str]:
    facts, cases = use
    types = dict.fromkeys(kind.removeprefix("*") for kind in facts.types if "i" not in kind)
    constants = [
        name if value is True else f"{name}={value}"
        for name, value in facts.constants.items()
        if name.isupper() and name != "PDL" and value is not False
    ]
    return [
        facts.kernel.removesuffix("_kernel"),
        " ".join(types),
        " ".join(constants),
        str(facts.registers),
        str(facts.spilled_bytes),
        str(facts.shared_bytes),
        str(facts.num_warps),
        str(facts.num_programs),
        " ".join(map(str, facts.copies_in_flight)),
        facts.tensor_cores,
        ", ".join(cases),
    ]


def count_steps() -> Iterator[tuple[str, str, StepCost]]:
    for name, (model, settings) in MODELS.items():
        counter = StepCounter(model, settings)
        for workload in WORKLOADS:
            yield name, workload, counter.count(workload)


def step_row(name: str, workload: str, cost: StepCost) -> list[str]:
    model, settings = MODELS[name]
    step, fp8 = Step.of_workload(workload, CONTEXT), bool(settings)  # of 8 bits, floats or integers
    floor_bytes = sum(part.num_bytes for part in parts(SHAPES[model], step, fp8=fp8))
    return [
        name,
        workload,
        str(cost.triton),
        str(cost.torch),
        str(cost.num_launches - cost.replayed),
        f"{floor_bytes / 1e6:,.0f}",
        f"{cost.activation_bytes / 1e6:,.0f}",
        f"{floor_seconds(SHAPES[model], step, H200, fp8=fp8) * 1e3:.2f}",
        f"{cost.activation_bytes / H200.bytes_per_second * 1e3:.2f}",
    ]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows])


def report(uses: Sequence[Use], steps: str) -> str:
    return "\n\n".join(
        [
            f"# Compiled for Hopper by triton {triton.__version__}",
            "## Kernels of bfloat16 and 8-bit models",
            table(_KERNEL_TITLES, [kernel_row(use) for use in uses if use[0].is_hot]),
            f"## Steps: launches, and bytes beside the floor of an H200; decodes after {CONTEXT} tokens",
            steps,
            "## Other kernels",
            table(_KERNEL_TITLES, [kernel_row(use) for use in uses if not use[0].is_hot]),
        ]
    )


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    folder: Path = parser.parse_args(argv).out
    folder.mkdir(parents=True, exist_ok=True)
    uses = compile_kernels()
    costs = list(count_steps())
    document = {
        "triton": triton.__version__,
        "kernels": [asdict(facts) | {"programs": facts.num_programs, "cases": cases} for facts, cases in uses],
        "steps": [{"model": name, "step": workload} | asdict(cost) for name, workload, cost in costs],
    }
    (folder / "kernels.json").write_text(json.dumps(document, indent=1))
    text = report(uses, table(_STEP_TITLES, [step_row(*cost) for cost in costs]))
    (folder / "report.md").write_text(text + "\n")
    print(text.partition("\n\n## Other")[0])
    print(f"\ngpu-static: everything is in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
