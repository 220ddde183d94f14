"""Everything that can only be seen on a GPU, in one go: tests, speed, profiles, the path over HTTP. See report_stages.

    make gpu-report STAGES="correctness Qwen3-0.6B" OUT=folder LIMIT=570

Writes a JSON file a stage, a log of all that was printed, and report.md. What the folder holds already is not measured
again, so the same command goes on where the last one ended; delete a stage's file to measure it anew. What fails or
takes too long is noted, tried again by the next command, and ends nothing else.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from report_stages import Stage, Step, all_stages, small_stages

from report_tables import read_results, report, yardstick
from watched import Outcome, run_watched

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("engine", "protos", "services/gateway", "tests", ".")
_SILENCE = 150.0  # seconds without a line after which a program hangs
_ATTEMPTS = 2  # in a row that bring nothing
_FIGURE = re.compile(r"[a-z0-9-]+: ")


class StageFile:
    """A stage's records and problems, on disk after every change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._document: dict[str, Any] = {"machine": "", "records": {}, "problems": {}}
        if path.is_file():
            self._document = json.loads(path.read_text())

    def missing(self, step: Step) -> list[str]:
        records = self._document["records"]
        done = {name for name, record in records.items() if record.get("complete", True)}
        return [name for name in step.workloads if step.prefix + name not in done]

    def take(self, step: Step, path: Path) -> None:
        """What a program has recorded."""
        if not path.is_file():
            return
        document = json.loads(path.read_text())
        self._document["machine"] = document.get("machine", self._document["machine"])
        for name, record in document["records"].items():
            self._document["records"][step.prefix + name] = record
            self._document["problems"].pop(step.prefix + name, None)
        self._write()

    def fail(self, step: Step, workload: str, problem: str, tail: Sequence[str]) -> None:
        self._document["problems"][step.prefix + workload] = {"problem": problem, "tail": list(tail)}
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._document, indent=1))


class Reporter:
    """Runs stages into a folder until the time is up."""

    def __init__(self, folder: Path, limit: float) -> None:
        self._folder = folder
        self._started = time.monotonic()
        self._deadline = self._started + limit
        self._log = (folder / "log.txt").open("a")

    def run(self, stage: Stage) -> None:
        file = StageFile(self._folder / f"{stage.name}.json")
        with tempfile.TemporaryDirectory() as cache:  # empty, for the start; what follows finds it filled
            for step in stage.steps:
                self._run_step(stage, step, file, {"TRITON_CACHE_DIR": cache})

    def say(self, line: str) -> None:
        print(f"gpu-report: {time.monotonic() - self._started:4.0f} s: {line}", flush=True)
        self._hear(line)

    def _run_step(self, stage: Stage, step: Step, file: StageFile, env: dict[str, str]) -> None:
        """A program that fails is started again without what it failed at, unless it never gets anywhere."""
        missing, ends, fruitless = file.missing(step), time.monotonic() + step.seconds, 0
        while missing:
            names = ", ".join(Path(name).name for name in missing)
            seconds = min(ends, self._deadline) - time.monotonic()
            if seconds <= 0:
                self.say(f"{stage.name}: no time is left for {names}")
                return
            self.say(f"{stage.name}: {step.program} for {step.prefix}{names}")
            before, outcome = len(missing), self._run_program(step, file, missing, seconds, env)
            missing = [name for name in file.missing(step) if name in missing]
            if outcome.problem is None:
                return
            fruitless = fruitless + 1 if len(missing) == before else 0
            failed = missing[:1] if step.goes_on and fruitless < _ATTEMPTS else missing
            self.say(f"{stage.name}: the program {outcome.problem}; without {', '.join(failed) or 'a loss'}")
            for index, name in enumerate(failed):
                file.fail(step, name, outcome.problem, [] if index else outcome.tail)
            missing = missing[len(failed) :]

    def _run_program(
        self, step: Step, file: StageFile, workloads: Sequence[str], seconds: float, env: dict[str, str]
    ) -> Outcome:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "records.json"
            outcome = run_watched(
                step.command(workloads, path),
                folder=_ROOT,
                env=_environment(env),
                seconds=seconds,
                silence=_SILENCE,
                on_line=self._follow,
            )
            file.take(step, path)
        return outcome

    def _follow(self, line: str) -> None:
        if _FIGURE.match(line) or "FAILED" in line:
            print(f"  {line[:160]}", flush=True)
        self._hear(line)

    def _hear(self, line: str) -> None:
        self._log.write(f"{line}\n")
        self._log.flush()


def _environment(env: dict[str, str]) -> dict[str, str]:
    """Programs find the packages where they lie, and then what else the caller has."""
    paths = [str(_ROOT / package) for package in _PACKAGES] + [os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--stages", nargs="*", metavar="NAME", help="default: all of them")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that all of it may take")
    parser.add_argument("--small", nargs=2, type=Path, metavar=("MODEL", "TESTS"), help="a tiny model; needs no GPU")
    arguments = parser.parse_args(argv)
    stages = {stage.name: stage for stage in (small_stages(*arguments.small) if arguments.small else all_stages())}
    if unknown := set(arguments.stages or ()) - set(stages):
        parser.error(f"there is no stage {min(unknown)}; there are {', '.join(stages)}")
    if not arguments.small and not has_gpu():
        print("gpu-report: there is no GPU here, or this Python's torch sees none; nothing was measured.")
        return 1
    signal.signal(signal.SIGTERM, _leave)
    arguments.out.mkdir(parents=True, exist_ok=True)
    reporter = Reporter(arguments.out, arguments.limit)
    for name in arguments.stages or stages:
        reporter.run(stages[name])
        (arguments.out / "report.md").write_text(report(read_results(arguments.out), yardstick()))
    print((arguments.out / "report.md").read_text()[:8000])
    return 0


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
