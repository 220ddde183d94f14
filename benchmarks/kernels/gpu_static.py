"""What can be known of speed on a GPU without one, from kernels compiled for it: on Hopper, or another kind.

    make gpu-static
    make gpu-static CAPABILITY=100
    pip install --no-deps --target /tmp/triton triton==3.6.0
    make gpu-static PYTHONPATH=/tmp/triton

Compiles every kernel variant that real models launch (`support/compiled_kernels.py`) and reports of each: registers and
spilled bytes of a thread, shared memory, programs that a multiprocessor runs at once, asynchronous copies in flight in
the loops that multiply matrices, and the tensor core instructions. On Hopper then, for a model's steps, launches and
bytes beside the floor of `floors.py`. Writes kernels.json and report.md to a folder and prints the hot kernels. Fails
if the GPU cannot run a variant, because it does not compile or takes more memory than a program has there.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import triton

from benchmarks.engine.floors import Card, Step, floor_seconds, parts
from benchmarks.kernels.static_steps import CONTEXT, WORKLOADS, StepCost, StepCounter
from benchmarks.real_shapes import SHAPES
from proa_engine.kernels.variants import Variant
from support.compiled_kernels import CASES, MORE_CASES, cases_for, make_pool, users
from support.kernel_facts import GPUS, HOPPER, Gpu, KernelFacts, facts_of

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("Qwen3-0.6B", {}),
    "Llama-3.1-8B": ("Llama-3.1-8B", {}),
    "Llama-3.1-8B fp8": ("Llama-3.1-8B", {"quantization": "fp8"}),
    "Llama-3.1-8B int4": ("Llama-3.1-8B int4", {}),
    "Llama-3.1-8B int8": ("Llama-3.1-8B int8", {}),
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


@dataclass(slots=True)
class Compiled:
    uses: list[Use] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # a sentence for each variant that the GPU cannot run
    num_variants: int = 0

    def add(self, facts: KernelFacts | str, cases: list[str]) -> None:
        """`facts`: a sentence if the variant does not compile."""
        self.num_variants += 1
        if isinstance(facts, str):
            self.failures.append(f"{facts} ({', '.join(cases)})")
            return
        self.uses.append((facts, cases))
        if facts.is_too_large:
            memory = f"{facts.shared_bytes} bytes of shared memory, {facts.tensor_columns} columns of tensor memory"
            self.failures.append(f"{facts.kernel} takes {memory}: {facts.constants} ({', '.join(cases)})")


def compile_kernels(gpu: Gpu) -> Compiled:
    started = time.monotonic()
    cases = cases_for([*CASES, *MORE_CASES], gpu)
    say(started, f"finding the kernels of {len(cases)} engines")
    compiled = Compiled()
    with make_pool() as pool:
        names = users(cases, pool, gpu)
        results = pool.map(partial(try_to_compile, gpu=gpu), names)
        for number, (facts, used_by) in enumerate(zip(results, names.values(), strict=True), start=1):
            compiled.add(facts, used_by)
            if number % 20 == 0 or number == len(names):
                say(started, f"compiled {number} of {len(names)} kernels")
    return compiled


def try_to_compile(variant: Variant, gpu: Gpu) -> KernelFacts | str:
    """Returns a sentence in place of the facts if the variant does not compile."""
    try:
        return facts_of(variant, gpu)
    except Exception as error:  # of the kernel's code, of Triton's passes, or of ptxas
        return f"{variant.name.rpartition('.')[2]} does not compile: {type(error).__name__}: {error}"


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
    step, fp8 = Step.of_workload(workload, CONTEXT), bool(settings)
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


def report(gpu: Gpu, compiled: Compiled, costs: Sequence[tuple[str, str, StepCost]]) -> str:
    num_running = compiled.num_variants - len(compiled.failures)
    hot = [kernel_row(use) for use in compiled.uses if use[0].is_hot]
    others = [kernel_row(use) for use in compiled.uses if not use[0].is_hot]
    steps_title = f"## Steps: launches, and bytes beside the floor of an H200; decodes after {CONTEXT} tokens"
    steps = [steps_title, table(_STEP_TITLES, [step_row(*cost) for cost in costs])] if costs else []
    return "\n\n".join(
        [
            f"# Compiled for {gpu.name} by triton {triton.__version__}",
            f"{num_running} of {compiled.num_variants} variants can run there.",
            *compiled.failures,
            "## Kernels of bfloat16 and 8-bit models",
            table(_KERNEL_TITLES, hot),
            *steps,
            "## Other kernels",
            table(_KERNEL_TITLES, others),
        ]
    )


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--capability", type=int, default=HOPPER.capability, choices=sorted(GPUS), help="compute capability times 10"
    )
    arguments = parser.parse_args(argv)
    folder: Path = arguments.out
    gpu = GPUS[arguments.capability]
    folder.mkdir(parents=True, exist_ok=True)
    compiled = compile_kernels(gpu)
    costs = list(count_steps()) if gpu is HOPPER else []
    document = {
        "triton": triton.__version__,
        "kernels": [asdict(facts) | {"programs": facts.num_programs, "cases": cases} for facts, cases in compiled.uses],
        "failures": compiled.failures,
        "steps": [{"model": name, "step": workload} | asdict(cost) for name, workload, cost in costs],
    }
    (folder / "kernels.json").write_text(json.dumps(document, indent=1))
    text = report(gpu, compiled, costs)
    (folder / "report.md").write_text(text + "\n")
    print(text.partition("\n\n## Other")[0])
    print(f"\ngpu-static: everything is in {folder}")
    if compiled.failures:
        raise SystemExit(f"{len(compiled.failures)} kernels cannot run on {gpu.name}: see {folder / 'report.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
