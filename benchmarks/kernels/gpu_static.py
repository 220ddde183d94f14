"""What can be known of speed on a GPU without one, from kernels compiled for it: on Hopper, or another kind.

    make gpu-static
    make gpu-static CAPABILITY=100
    pip install --no-deps --target /tmp/triton triton==3.6.0
    make gpu-static PYTHONPATH=/tmp/triton

Compiles every kernel variant that real models launch (`support/compiled_kernels.py`) and reports of each: registers and
spilled bytes of a thread, shared memory, programs that a multiprocessor runs at once, asynchronous copies in flight in
the loops that multiply matrices, and the tensor core instructions. On Hopper then, for a model's steps, launches and
bytes beside the floor of `floors.py`, and launches of decodes with draft tokens beside those without. Writes
kernels.json and report.md to a folder and prints the hot kernels. Fails if the GPU cannot run a variant, because it
does not compile or takes more memory than a program has there.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import triton

from benchmarks.engine.bench import GRAMMAR, PLAIN, UNCAPTURED
from benchmarks.engine.floors import Card, Step, floor_seconds, parts
from benchmarks.kernels.static_steps import CONTEXT, WORKLOADS, StaticEngine, StepCost, StepCounter
from benchmarks.real_shapes import SHAPES
from proa.contract import SamplingParams
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.kernels.variants import Variant
from support.compiled_kernels import CASES, MORE_CASES, cases_for, make_pool, users
from support.kernel_facts import GPUS, HOPPER, Gpu, KernelFacts, facts_of
from support.masks import masks_of

MODELS: Mapping[str, StaticEngine] = {
    "Qwen3-0.6B": StaticEngine("Qwen3-0.6B"),
    "Llama-3.1-8B": StaticEngine("Llama-3.1-8B"),
    "Llama-3.1-8B fp8": StaticEngine("Llama-3.1-8B", "fp8"),
    "Llama-3.1-8B int4": StaticEngine("Llama-3.1-8B int4"),
    "Llama-3.1-8B int8": StaticEngine("Llama-3.1-8B int8"),
    "Llama-3.1-8B nvfp4": StaticEngine("Llama-3.1-8B nvfp4"),
    "Qwen3-30B-A3B": StaticEngine("Qwen3-30B-A3B"),
    "Qwen3-30B-A3B int4": StaticEngine("Qwen3-30B-A3B int4"),
    "Qwen3-30B-A3B nvfp4": StaticEngine("Qwen3-30B-A3B nvfp4"),
    "gpt-oss-20b": StaticEngine("gpt-oss-20b"),
}
DRAFTS: Sequence[tuple[str, SpeculativeConfig]] = [
    ("Llama-3.1-8B", SpeculativeConfig(method="ngram", num_speculative_tokens=3)),
    (
        "Llama-3.1-8B",
        SpeculativeConfig(method="eagle3", model="Llama-3.1-8B EAGLE-3", num_speculative_tokens=3),
    ),
    ("Qwen3.5-35B-A3B", SpeculativeConfig(method="mtp", num_speculative_tokens=3)),
    (
        "Qwen3.5-35B-A3B",
        SpeculativeConfig(method="dflash", model="Qwen3.5-35B-A3B DFlash", num_speculative_tokens=15),
    ),
]
DRAFT_WORKLOADS = ("decode-1", "decode-8", "decode-64")
SAMPLED = ("Qwen3-0.6B", "decode-64")  # by which samplings are compared
H200 = Card(4.25e12, 799e12)
_KERNEL_TITLES = [
    *("kernel", "types", "constants", "registers", "spilled", "shared", "warps", "programs", "in-flight"),
    *("tensor-cores", "launched-by"),
]
_STEP_TITLES = [
    *("model", "step", "Triton", "torch", "outside-graphs", "floor-MB", "activations-MB", "floor-ms"),
    "activations-ms",
]
_SAMPLING_TITLES = ["sampling", "Triton", "torch", "outside-graphs"]
_DRAFT_TITLES = [
    *("model", "drafts", "step", "without drafts", "with 0", "with all", "proposals and layers", "entries"),
    "outside-graphs",
]

Use = tuple[KernelFacts, list[str]]  # a variant and the names of the cases that launch it


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step of decodes: of an engine without drafts, and of one with them that plans none or all."""

    shape: str
    drafts: SpeculativeConfig
    workload: str
    without: StepCost
    zero: StepCost
    full: StepCost


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
    for name, engine in MODELS.items():
        counter = StepCounter(engine)
        for workload in WORKLOADS:
            yield name, workload, counter.count(workload)


def step_row(name: str, workload: str, cost: StepCost) -> list[str]:
    engine, step = MODELS[name], Step.of_workload(workload, CONTEXT)
    shape, fp8 = SHAPES[engine.shape], engine.has_fp8
    floor_bytes = sum(part.num_bytes for part in parts(shape, step, fp8=fp8))
    return [
        name,
        workload,
        str(cost.triton),
        str(cost.torch),
        str(cost.outside_graphs),
        f"{floor_bytes / 1e6:,.0f}",
        f"{cost.activation_bytes / 1e6:,.0f}",
        f"{floor_seconds(shape, step, H200, fp8=fp8) * 1e3:.2f}",
        f"{cost.activation_bytes / H200.bytes_per_second * 1e3:.2f}",
    ]


def count_samplings() -> Iterator[tuple[str, StepCost]]:
    """A step of decodes that are sampled plainly, and in each of the ways that are not part of its graph."""
    model, workload = SAMPLED
    counter, rows = StepCounter(MODELS[model]), range(Step.of_workload(workload, CONTEXT).sequences)
    yield "plain", counter.count(workload)
    for name, params in UNCAPTURED.items():
        if name == GRAMMAR:
            cost = counter.count(workload, masks=masks_of({row: [1] for row in rows}, counter.vocab_size))
        else:
            cost = counter.count(workload, sampling=SamplingParams(**{**PLAIN, **params}))
        yield name.removesuffix("-"), cost


def count_drafts() -> Iterator[DraftedStep]:
    shapes = dict.fromkeys(shape for shape, _ in DRAFTS)
    without = {
        (shape, workload): counter.count(workload)
        for shape, counter in ((shape, StepCounter(StaticEngine(shape))) for shape in shapes)
        for workload in DRAFT_WORKLOADS
    }
    for shape, drafts in DRAFTS:
        counter = StepCounter(StaticEngine(shape, drafts=drafts))
        for workload in DRAFT_WORKLOADS:
            zero, full = counter.count(workload), counter.count(workload, drafts.max_drafts)
            yield DraftedStep(shape, drafts, workload, without[shape, workload], zero, full)


def draft_row(step: DraftedStep) -> list[str]:
    return [
        step.shape,
        f"{step.drafts.max_drafts} of {step.drafts.method}",
        step.workload,
        *(f"{cost.triton} + {cost.torch}" for cost in (step.without, step.zero, step.full)),
        *map(str, step.full.replayed),
        str(step.full.outside_graphs),
    ]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows])


def report(
    gpu: Gpu,
    compiled: Compiled,
    costs: Sequence[tuple[str, str, StepCost]],
    sampled: Sequence[tuple[str, StepCost]],
    drafted: Sequence[DraftedStep],
) -> str:
    num_running = compiled.num_variants - len(compiled.failures)
    hot = [kernel_row(use) for use in compiled.uses if use[0].is_hot]
    others = [kernel_row(use) for use in compiled.uses if not use[0].is_hot]
    steps_title = f"## Steps: launches, and bytes beside the floor of an H200; decodes after {CONTEXT} tokens"
    steps = [steps_title, table(_STEP_TITLES, [step_row(*cost) for cost in costs])] if costs else []
    if sampled:
        steps.append(f"## Sampling: launches of {SAMPLED[1]} of {SAMPLED[0]}")
        rows = ([name, str(cost.triton), str(cost.torch), str(cost.outside_graphs)] for name, cost in sampled)
        steps.append(table(_SAMPLING_TITLES, rows))
    if drafted:
        drafts_title = "## Decodes with draft tokens: launches by Triton + torch, beside an engine without drafts"
        steps += [drafts_title, table(_DRAFT_TITLES, map(draft_row, drafted))]
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
    sampled = list(count_samplings()) if gpu is HOPPER else []
    drafted = list(count_drafts()) if gpu is HOPPER else []
    document = {
        "triton": triton.__version__,
        "kernels": [asdict(facts) | {"programs": facts.num_programs, "cases": cases} for facts, cases in compiled.uses],
        "failures": compiled.failures,
        "steps": [{"model": name, "step": workload} | asdict(cost) for name, workload, cost in costs],
        "samplings": [{"sampling": name} | asdict(cost) for name, cost in sampled],
        "drafts": [asdict(step) for step in drafted],
    }
    (folder / "kernels.json").write_text(json.dumps(document, indent=1))
    text = report(gpu, compiled, costs, sampled, drafted)
    (folder / "report.md").write_text(text + "\n")
    print(text.partition("\n\n## Other")[0])
    print(f"\ngpu-static: everything is in {folder}")
    if compiled.failures:
        raise SystemExit(f"{len(compiled.failures)} kernels cannot run on {gpu.name}: see {folder / 'report.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
