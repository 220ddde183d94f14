"""What `make gpu-report` measures, in which order, and how long each part may take. Runs nothing.

On an H200 a stage should take, in seconds: correctness 380; Qwen3-0.6B 240; Llama-3.1-8B 340; Llama-3.1-8B-fp8 80;
Qwen3-30B-A3B 120. Limits are twice that and more.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve import WORKLOADS as OVER_HTTP

from engine import TABLE

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_PROFILES = ("profile-decode-1", "profile-decode-64", "profile-decode-256", "profile-prefill-1x1024")
_CLOSED = tuple(f"closed-{clients}" for clients in (1, 16, 64, 256))
_REPETITIVE = ("repetitive-1", "repetitive-64")
_INVARIANT = ("decode-1", "decode-64", "decode-256", "prefill-1x1024", "prefill-8x8192")
NGRAM = '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}'
INVARIANT = '{"batch_invariant": true}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One program and what it records. It takes `--workloads` and `--json`."""

    program: str
    workloads: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    prefix: str = ""  # of its records' names
    seconds: float
    goes_on: bool = True  # is started again after a failure, without the workload that failed

    def command(self, workloads: Sequence[str], path: Path) -> list[str]:
        program = [sys.executable, str(_HERE / self.program), *self.arguments]
        return [*program, f"--json={path}", "--workloads", *workloads]


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    steps: tuple[Step, ...]


def all_stages() -> list[Stage]:
    files = tuple(str(path.relative_to(_ROOT)) for path in sorted(_ROOT.glob("tests/gpu/test_*.py")))
    return [
        Stage("correctness", (Step(program="gpu_tests.py", workloads=files, seconds=520, goes_on=False),)),
        Stage("Qwen3-0.6B", _served_model("Qwen3-0.6B", engine=270, ngram=100, invariant=100, http=200)),
        Stage("Llama-3.1-8B", _served_model("Llama-3.1-8B", engine=360, ngram=120, invariant=150, http=260)),
        Stage("Llama-3.1-8B-fp8", (_engine("Llama-3.1-8B", 240, (), "--quantization=fp8"),)),
        Stage("Qwen3-30B-A3B", (_engine("Qwen3-30B-A3B", 300, ()),)),
    ]


def _engine(model: str, seconds: float, more: tuple[str, ...], *arguments: str) -> Step:
    workloads = (*TABLE, *_PROFILES, *more)
    return Step(program="engine.py", workloads=workloads, arguments=(f"--model={model}", *arguments), seconds=seconds)


def _served_model(model: str, *, engine: float, ngram: float, invariant: float, http: float) -> tuple[Step, ...]:
    return (
        _engine(model, engine, (*_REPETITIVE, *_CLOSED)),
        Step(program="serve.py", workloads=OVER_HTTP, arguments=(f"--model={model}",), seconds=http),
        Step(
            program="engine.py",
            workloads=(*_REPETITIVE, "decode-1", "decode-64"),
            arguments=(f"--model={model}", f"--options={NGRAM}"),
            prefix="ngram/",
            seconds=ngram,
        ),
        Step(
            program="engine.py",
            workloads=_INVARIANT,
            arguments=(f"--model={model}", f"--options={INVARIANT}"),
            prefix="invariant/",
            seconds=invariant,
        ),
    )


def small_stages(model: Path, tests: Path) -> list[Stage]:
    """The same programs on a tiny model, to see that all of it runs, on any machine."""
    arguments = (f"--model={model}", "--max-model-len=128", "--small")
    workloads = ("start", "mixed", "decode-2", "prefill-2x16", "repetitive-2", "closed-2")
    profiles = ("profile-decode-2", "profile-prefill-1x16")
    engine = Step(
        program="engine.py",
        workloads=(*workloads, *profiles),
        arguments=(*arguments, f"--options={NGRAM}"),
        prefix="ngram/",
        seconds=90,
    )
    http = Step(program="serve.py", workloads=("http-2x1", "http-4x2"), arguments=arguments, seconds=90)
    return [
        Stage("correctness", (Step(program="gpu_tests.py", workloads=(str(tests),), seconds=60, goes_on=False),)),
        Stage("Qwen3-0.6B", (engine, http)),
    ]
