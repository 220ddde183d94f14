"""What a GPU report measures, in which order, and how long each step may take. Runs nothing.

The order is that of calls of ten minutes: what shows that kernels are right comes first, then what has never run on a
GPU, the tiers of the KV cache and adapters, and last the figures of docs/performance.md and those of another engine.
The limits of a call's steps add up to at most `CALL_SECONDS`, and a step may also use what the steps before it left of
theirs.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.engine.bench import OWN, UNCAPTURED
from benchmarks.engine.speed import TABLE, THROUGHPUT

_ROOT = Path(__file__).parents[2]
NGRAM = '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}'
INVARIANT = '{"batch_invariant": true}'
HOST = '{"kv_offloading_size": 16}'
LORA = '{"enable_lora": true, "max_loras": 8}'
# Kernels before the models made of them, and those before engines. They run in the first call, other files later.
FIRST_TESTS = ("kernels", "quantized", "chains", "models", "engine")
START = frozenset({"start", "serve-start"})  # workloads that begin with an empty Triton cache
_DECODES = ("decode-1", "decode-64", "decode-256")
_FIRST_FIGURES = ("start", *_DECODES, "prefill-1x1024", "mixed")  # of a model; the rest of its table comes after them
_OWN_MIXED = f"{OWN}mixed"
_LONG_PREFILL = "prefill-8x8192"
_FIRST_PROFILES = ("decode-1", "decode-64", "prefill-1x1024")
_PREFILLS = ("prefill-1x1024", _LONG_PREFILL)
_RIGHT_AGAIN = (
    *(f"{kind}{each}" for kind in ("profile-", OWN) for each in _DECODES),
    *(f"{sampled}{each}" for sampled in ("", *UNCAPTURED) for each in _DECODES[:2]),
)
_NEVER_RUN = ("start", *_DECODES, "prefill-1x1024")
_REPETITIVE = ("repetitive-1", "repetitive-64")
SWITCHED = "switch/"  # of a record's name: what is set in the environment, and the number of the run, come next
_SWITCHED = ("decode-1", "decode-8")
_PREFETCH = "PROA_L2_PREFETCH=24"
# Another engine beside Proa, by one program
_GENERATED = ("start", *_DECODES, "prefill-1x1024", "prefill-8x8192", "mixed")
_SIDES = (
    ("Qwen3-0.6B", "proa_engine", 55.0),
    ("Qwen3-0.6B", "vllm", 115.0),
    ("Llama-3.1-8B", "proa_engine", 95.0),
    ("Llama-3.1-8B", "vllm", 150.0),
)
_SMALL_WORKLOADS = {
    r"images-\d+": "decode-2",  # a tiny model reads none
    r"prefill-\d+x\d+": "prefill-2x16",
    r"batch-\d+x\d+x\d+": "batch-2x8x4",
    r"http-\d+x": "http-2x",
    r"tiers-\d+": "tiers-128",  # shorter prompts are computed again
    r"(decode|repetitive|closed|adapters)-\d+": r"\1-2",
    r"Llama-3.1-8B.*|Qwen3-.*B": "Qwen3-0.6B",
}
CALL_SECONDS = 530.0  # of the default limit of a call, 560 s: the rest is for the preflight


@dataclass(frozen=True, slots=True)
class Mode:
    """What is switched off to find the cause of a failure."""

    name: str = ""
    enforce_eager: bool = False
    environment: tuple[tuple[str, str], ...] = ()


MODES = (
    Mode("without CUDA graphs", enforce_eager=True),
    Mode("without dependent launch", environment=(("PROA_DEPENDENT_LAUNCH", "0"),)),
    Mode("without both", enforce_eager=True, environment=(("PROA_DEPENDENT_LAUNCH", "0"),)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One program and what it records. It takes `--workloads` and `--json`; see `records` for what it writes."""

    stage: str
    program: str  # a module of `benchmarks`
    workloads: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    prefix: str = ""  # of its records' names
    environment: tuple[tuple[str, str], ...] = ()
    seconds: float
    silence: float = 90.0  # seconds without a line after which it hangs
    needs: str = "engine"  # the record of the preflight without which it cannot run
    is_test: bool = False  # runs tests: goes on from a stage's records by itself, and is tried again in other modes
    mode: Mode = Mode()

    def command(self, workloads: Sequence[str], path: Path) -> list[str]:
        program = [sys.executable, "-m", f"benchmarks.{self.program}", *self.arguments]
        if self.mode.enforce_eager and self.program in ("engine.speed", "http.serve", "report.gpu_tests"):
            program.append("--enforce-eager")
        return [*program, f"--json={path}", "--workloads", *workloads]

    def variables(self) -> dict[str, str]:
        """What is set in the program's environment; by its mode, if by both."""
        threads = {"OMP_NUM_THREADS": "2"} if self.is_test else {}
        return dict(self.environment) | dict(self.mode.environment) | threads

    def names(self, workloads: Sequence[str]) -> list[str]:
        return [self.prefix + workload for workload in workloads]


PREFLIGHT = Step(
    stage="preflight",
    program="report.preflight",
    workloads=("packages", "gpu", "engine", "tests", "http", "peer"),
    seconds=90.0,
)


def smoke() -> Step:
    """The tests that each call begins with.

    A kernel's test may take 45 s and the engine's 100 s (set in its file), less than the step: a test that hangs ends
    its own process, and the others still run.
    """
    return _tests("smoke", ["smoke"], processes=4, timeout=45, seconds=240)


def calls() -> list[tuple[Step, ...]]:
    """The steps of each call, after the smoke tests. One that was measured by an earlier call is skipped.

    In the fourth and fifth call, one process of a model measures its figures and then profiles it. A restart finds the
    kernels that this process has compiled.
    """
    return [
        (
            _tests("correctness", FIRST_TESTS, processes=14, timeout=150, seconds=200),
            _engine("Qwen3-0.6B", _RIGHT_AGAIN, 27),
            _engine("Llama-3.1-8B", _RIGHT_AGAIN, 43),
            _engine("Llama-3.1-8B-fp8", ("prefill-1x1024x10",), 20),
        ),
        (
            _engine("gpt-oss-20b", ("start", *_DECODES, THROUGHPUT, *_PREFILLS), 85, '{"max_num_seqs": 512}'),
            _engine("Llama-3.1-8B int4", _NEVER_RUN, 35),
            _engine("Llama-3.1-8B nvfp4", _NEVER_RUN, 35),
            _engine("Llama-3.1-8B int8", _NEVER_RUN, 35),
            _engine("Qwen3-30B-A3B nvfp4", _NEVER_RUN, 45),
            _engine("Llama-3.1-8B", (*_REPETITIVE, *_DECODES[:2]), 50, NGRAM, prefix="ngram/"),
            _engine("Llama-3.1-8B", (*_DECODES, *_PREFILLS), 65, INVARIANT, prefix="invariant/"),
            _engine("Qwen3-VL-8B", ("start", "images-1200", "decode-64"), 80),
            _loading(40),
            _engine("gpt-oss-20b", _profiles(*_FIRST_PROFILES), 50, '{"max_num_seqs": 512}'),
        ),
        (
            _engine("Llama-3.1-8B", ("mixed", *_DECODES), 71, HOST, prefix="host/"),
            _engine("Qwen3-0.6B", ("mixed", *_DECODES), 40, HOST, prefix="host/"),
            _tiers("Llama-3.1-8B", 95),
            _tiers("Qwen3-0.6B", 61),
            _prefill_decode("Qwen3-0.6B", 120),
            _engine("Llama-3.1-8B", ("adapters-1", "adapters-64", *_DECODES[:2]), 45, LORA, prefix="lora/"),
            *_switches("Qwen3-0.6B", ("", "PROA_L2_PREFETCH=8", _PREFETCH, "PROA_DEPENDENT_LAUNCH=0"), 8.0),
            *_switches("Llama-3.1-8B", ("", _PREFETCH), 8.5),
        ),
        (
            _engine("Llama-3.1-8B", (*_FIRST_FIGURES, *TABLE, *_profiles(*_FIRST_PROFILES)), 110),
            _engine("Qwen3-0.6B", (*_FIRST_FIGURES, *TABLE, _OWN_MIXED, *_profiles(*_FIRST_PROFILES)), 65),
            _engine("Llama-3.1-8B-fp8", (*_FIRST_FIGURES, *TABLE, *_profiles(*_FIRST_PROFILES)), 90),
            _engine("Llama-3.1-8B", ("restart",), 12),
            _engine("Qwen3-0.6B", ("restart",), 10),
            _engine("Qwen3-30B-A3B", (*_FIRST_FIGURES, *TABLE, *_profiles(*_FIRST_PROFILES)), 135),
            _over_http("Qwen3-0.6B", ("serve-start", "http-64x1", "http-256x2", "own-http-64x1"), 75),
            _sweep("kernels.decode_attention", 33, "Qwen3-30B-A3B"),
        ),
        (
            _over_http("Llama-3.1-8B", ("serve-start", "http-64x1", "http-256x2"), 90),
            _engine("Qwen3-0.6B", ("closed-64", "closed-256"), 40),
            _engine("Llama-3.1-8B", ("closed-64", "closed-256", _OWN_MIXED), 105),
            _tests("correctness", other_tests(), processes=14, timeout=150, seconds=140),
            _engine("Llama-3.1-8B", _profiles(_LONG_PREFILL), 35),
            _sweep("kernels.prefill_attention", 45),
            _sweep("kernels.skinny_gemm", 65, "Llama-3.1-8B-fp8"),
        ),
        (
            *(_generated(model, package, seconds) for model, package, seconds in _SIDES),
            _over_http("Llama-3.1-8B", ("http-16x1",), 55),
            _over_http("Qwen3-0.6B", ("http-1x1",), 45),
        ),
    ]


def steps_of(call: int | None, *, alone: bool = False) -> list[Step]:
    """The smoke tests, the steps of a call and then those of the calls before it, of which only what they left is run;
    `alone`: without those. None: the steps of all calls."""
    in_order = calls()
    if call is not None:
        in_order = [in_order[call - 1], *([] if alone else in_order[: call - 1])]
    return [smoke(), *(step for steps in in_order for step in steps)]


def in_small(step: Step, model: Path, tests: Path) -> Step:
    """The same program with a tiny model or other tests, to see that all of it runs, on any machine: kernels in
    Triton's interpreter."""
    if step.is_test:
        return replace(step, workloads=(str(tests),), arguments=("--processes=1", "--timeout=5"), seconds=60.0)
    given = [argument for argument in step.arguments if not argument.startswith("--model=")]
    given = [argument.replace(HOST, '{"kv_offloading_size": 0.1}') for argument in given]
    tiny = {
        "engine.speed": (f"--model={model}", "--max-model-len=128", "--small"),
        "engine.generate": (f"--model={model}", "--max-model-len=128", "--small"),
        "http.serve": (f"--model={model}", "--max-model-len=128", "--small"),
        "cache.kv_tiers": ("--model=builtin", "--rounds=1", "--host-gib=1"),
        "cache.prefill_decode": ("--model=builtin", "--streams=2", "--length=64", "--seconds=2"),
        "engine.load_weights": ("--gigabytes=0.02",),
        "kernels.prefill_attention": ("--small",),
        "kernels.decode_attention": ("--small",),
        "kernels.skinny_gemm": ("--rows=2",),
    }[step.program]
    workloads = tuple(dict.fromkeys(_small_workload(each) for each in step.workloads))
    if step.program.startswith("kernels."):
        step = replace(step, environment=(("TRITON_INTERPRET", "1"),))
    if step.program == "kernels.skinny_gemm":
        workloads = ("tiny",)  # the interpreter takes minutes for a model's products
    return replace(step, workloads=workloads, arguments=(*given, *tiny), seconds=90.0)


def _small_workload(name: str) -> str:
    """The workload of two requests, or of another small size."""
    for pattern, small in _SMALL_WORKLOADS.items():
        if re.search(pattern, name):
            return re.sub(pattern, small, name)
    return name


def in_mode(step: Step, mode: Mode) -> Step:
    return replace(step, mode=mode)


def trial(step: Step, mode: Mode, workloads: Sequence[str]) -> Step:
    """A short run of what failed, in another mode, recorded beside it."""
    return replace(step, mode=mode, prefix=f"{mode.name}/", workloads=tuple(workloads), seconds=min(step.seconds, 60.0))


def other_tests() -> list[str]:
    """Names of the test files in tests/gpu, but for the smoke tests and those of the first call."""
    names = {path.stem.removeprefix("test_gpu_") for path in (_ROOT / "tests/gpu").glob("test_gpu_*.py")}
    return sorted(names - {"smoke", *FIRST_TESTS})


def _tests(stage: str, names: Sequence[str], *, processes: int, timeout: int, seconds: float) -> Step:
    """`timeout`: seconds of a test. One of engines compiles their kernels in its own process."""
    return Step(
        stage=stage,
        program="report.gpu_tests",
        workloads=tuple(f"tests/gpu/test_gpu_{name}.py" for name in names),
        arguments=(f"--processes={processes}", f"--timeout={timeout}"),
        seconds=seconds,
        silence=max(2.0 * timeout, 200.0),  # longer than any test may take, those with a limit of their own included
        needs="tests",
        is_test=True,
    )


def _engine(stage: str, workloads: tuple[str, ...], seconds: float, options: str = "{}", prefix: str = "") -> Step:
    model, fp8, _ = stage.partition("-fp8")
    arguments = (f"--model={model}", *(["--quantization=fp8"] if fp8 else []))
    if json.loads(options):
        arguments += (f"--options={options}",)
    return Step(
        stage=stage,
        program="engine.speed",
        workloads=tuple(dict.fromkeys(workloads)),
        arguments=arguments,
        prefix=prefix,
        seconds=seconds,
    )


def _switches(model: str, settings: Sequence[str], seconds: float) -> list[Step]:
    """Decodes with each of `settings`, `NAME=VALUE` or nothing, in turn, twice, so that the GPU's clock changes for
    all of them. `seconds`: of each run."""
    return [
        replace(
            _engine(model, _SWITCHED, seconds, prefix=f"{SWITCHED}{setting or 'none'}/{run}/"),
            environment=tuple((name, value) for name, mark, value in [setting.partition("=")] if mark),
        )
        for run in (1, 2)
        for setting in settings
    ]


def _over_http(model: str, workloads: tuple[str, ...], seconds: float) -> Step:
    return Step(
        stage=model,
        program="http.serve",
        workloads=workloads,
        arguments=(f"--model={model}",),
        seconds=seconds,
        needs="http",
    )


def _generated(model: str, package: str, seconds: float) -> Step:
    """Both sides of a comparison with another engine."""
    return Step(
        stage=model,
        program="engine.generate",
        workloads=_GENERATED,
        arguments=(f"--model={model}", f"--package={package}"),
        prefix=f"generate/{package}/",
        seconds=seconds,
        silence=150.0,  # another engine starts without a line
        needs="peer" if package == "vllm" else "engine",
    )


def _tiers(model: str, seconds: float) -> Step:
    """Host loads and fetches against prefill."""
    return Step(
        stage=model,
        program="cache.kv_tiers",
        workloads=("tiers-1024", "tiers-8192"),
        arguments=(f"--model={model}", "--host-gib=16"),
        prefix="host/",
        seconds=seconds,
    )


def _prefill_decode(model: str, seconds: float) -> Step:
    """Two engines share the card, in two processes."""
    return Step(
        stage=model,
        program="cache.prefill_decode",
        workloads=("idle", "one", "two"),
        arguments=(
            *(f"--model={model}", "--streams=32", "--length=8192"),
            *("--engine-arguments", "gpu-memory-utilization=0.4"),
        ),
        prefix="streams/",
        seconds=seconds,
        needs="http",
    )


def _loading(seconds: float) -> Step:
    return Step(
        stage="loading",
        program="engine.load_weights",
        workloads=("ahead", "one-by-one"),
        arguments=("--gigabytes=4", "--runs=1"),
        seconds=seconds,
    )


def _sweep(program: str, seconds: float, *more: str) -> Step:
    workloads = ("Llama-3.1-8B", "Qwen3-0.6B", *more)
    return Step(stage=program.rpartition(".")[2], program=program, workloads=workloads, seconds=seconds)


def _profiles(*workloads: str) -> tuple[str, ...]:
    return tuple(f"profile-{workload}" for workload in workloads)
