"""Everything that can only be seen on a GPU: tests, speed, profiles, the path over HTTP. See report_stages.

    python3 -m benchmarks.report.gpu_report --call 1 --out first
    python3 -m benchmarks.report.gpu_report --call 2 --out second --earlier first
    python3 -m benchmarks.report.gpu_report --call 3 --out third --earlier first second

Needs neither make nor an installed Proa. A call takes less than ten minutes (--limit). The first one shows that kernels
are right, the second one runs what has never run on a GPU, the third one the tiers of the KV cache and adapters; the
fourth and the fifth fill the tables, the sixth measures vLLM, if it is installed, beside Proa. Without --call
everything is run in this order. Writes results.json after every figure, log.txt with all that was printed, and
report.md.

What results.json or --earlier has, of the same kind of GPU, is not measured again, and tests that passed are not run
again; --again names exceptions. What fails, hangs or takes too long is noted, tried again by the next run, and ends
nothing else. Tests that fail, and smoke tests that run out of time, are run without CUDA graphs and without dependent
launch too. If only then the smoke tests pass, the rest of the run is measured so, and its records say it.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import FrameType

from benchmarks.records import Results, gpu_of, read_stages, write_json
from benchmarks.report.report_stages import (
    MODES,
    PREFLIGHT,
    START,
    Mode,
    Step,
    calls,
    in_mode,
    in_small,
    steps_of,
    trial,
)
from benchmarks.report.report_tables import report, tables, yardstick
from benchmarks.report.watched import Outcome, run_watched

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("engine", "protos", "services/gateway", "services/cli", "tests", ".")
_LIMIT = 560.0
_ATTEMPTS = 2  # in a row that bring nothing
_SHOWN = re.compile(r"[A-Za-z0-9.-]+: |.*(PASSED|FAILED|ERROR|Error)")


class Reporter:
    """Runs steps into a folder until the time is up."""

    def __init__(self, folder: Path, limit: float, scratch: Path) -> None:
        self.results = Results(scratch)  # of the preflight; those of the report replace it
        self._scratch = scratch
        self._site = scratch / "site"
        self._site.mkdir()
        write_metadata(self._site)
        self._started = time.monotonic()
        self._deadline = self._started + limit
        self._planned_end = self._started  # of the steps before, had each taken its whole limit
        self._log = (folder / "log.txt").open("a")
        self.mode = Mode()  # in which the steps to come are measured

    def run(self, step: Step) -> None:
        """Run what is missing of a step, and tests that fail once more in other modes.

        A step may use its limit and what the steps before it left of theirs. Smoke tests that run out of time count as
        failed: what hangs may hold the interpreter, so that the limit of the test itself cannot end it. A mode in which
        an earlier call's smoke tests passed is used at once: the hang would take minutes of each call.
        """
        names, is_smoke = step.names(step.workloads), step.stage == "smoke"
        if not self.results.missing(step.stage, names):
            return
        checks = self.results.records(PREFLIGHT.stage)
        if step.stage != PREFLIGHT.stage and not checks.get(step.needs, {}).get("complete", False):
            self.say(f"{step.stage}: not run, because the preflight of {step.needs} failed")
            return
        ends = max(time.monotonic(), self._planned_end) + step.seconds
        if step.stage != PREFLIGHT.stage:
            self._planned_end = ends
        if is_smoke and (known := self._passing_mode(step)) is not None:
            self.say(f"smoke: what failed in an earlier call passes {known.name}")
            self.mode = known
            return
        step = in_mode(step, self.mode)
        self._run(step, ends)
        failed = self.results.failed(step.stage, names, or_out_of_time=is_smoke) if step.is_test else []
        for mode in MODES if failed else ():
            again = trial(step, mode, failed)
            self._run(again, time.monotonic() + again.seconds)
            if not self.results.missing(step.stage, again.names(failed)):
                self.say(f"{step.stage}: what failed passes {mode.name}")
                self.mode = mode if is_smoke else self.mode
                return

    def close(self) -> None:
        self._log.close()

    def say(self, line: str) -> None:
        print(f"gpu-report: {time.monotonic() - self._started:4.0f} s: {line}", flush=True)
        self._hear(line)

    def _passing_mode(self, step: Step) -> Mode | None:
        """The first mode in which everything of the step has passed."""
        trials = ((mode, trial(step, mode, step.workloads)) for mode in MODES)
        return next(
            (mode for mode, each in trials if not self.results.missing(step.stage, each.names(step.workloads))), None
        )

    def _run(self, step: Step, ends: float) -> None:
        """A program that fails is started again without what it failed at, unless it never gets anywhere."""
        done = set(step.names(step.workloads)) - set(self.results.missing(step.stage, step.names(step.workloads)))
        missing = [name for name in step.workloads if step.prefix + name not in done]
        fruitless = 0
        while missing:
            names = ", ".join(Path(name).name for name in missing)
            seconds = min(ends, self._deadline) - time.monotonic()
            if seconds <= 0:
                self.say(f"{step.stage}: no time is left for {names}")
                return
            self.say(f"{step.stage}: {step.program} for {step.prefix}{names}")
            before, outcome = len(missing), self._run_program(step, missing, seconds)
            unfinished = set(self.results.missing(step.stage, step.names(missing)))
            missing = [name for name in missing if step.prefix + name in unfinished]
            if outcome.problem is None or not missing:
                return
            fruitless = fruitless + 1 if len(missing) == before else 0
            goes_on = not step.is_test and fruitless < _ATTEMPTS
            failed = missing[:1] if goes_on and not outcome.out_of_time else missing
            self.say(f"{step.stage}: the program {outcome.problem}; without {', '.join(failed)}")
            for index, name in enumerate(failed):
                tail = [] if index else outcome.tail
                name = step.prefix + name
                self.results.fail(step.stage, name, outcome.problem, tail, out_of_time=outcome.out_of_time)
            missing = missing[len(failed) :]

    def _run_program(self, step: Step, workloads: Sequence[str], seconds: float) -> Outcome:
        path = self._scratch / "records.json"
        path.unlink(missing_ok=True)
        written = 0

        def follow(line: str) -> None:
            """What is recorded is kept at once: this process may be killed too."""
            nonlocal written
            if path.is_file() and (changed := path.stat().st_mtime_ns) != written:
                written = changed
                self.results.take(step.stage, path, step.prefix, step.mode.name)
            if _SHOWN.match(line):
                print(f"  {line[:160]}", flush=True)
            self._hear(line)

        command, cache = step.command(workloads, path), self._scratch / ("tests" if step.is_test else step.stage)
        if not START.isdisjoint(workloads):  # with an empty cache
            shutil.rmtree(cache, ignore_errors=True)
        if step.is_test:
            earlier = self._scratch / "earlier.json"
            write_json(earlier, {"records": self.results.records(step.stage)})
            command.append(f"--earlier={earlier}")
        outcome = run_watched(
            command,
            folder=_ROOT,
            env=_environment(step.variables() | {"TRITON_CACHE_DIR": str(cache)}, self._site, self._scratch),
            seconds=seconds,
            silence=step.silence,
            on_line=follow,
        )
        self.results.take(step.stage, path, step.prefix, step.mode.name)
        return outcome

    def _hear(self, line: str) -> None:
        self._log.write(f"{line}\n")
        self._log.flush()


def write_metadata(folder: Path) -> None:
    """Write the versions of Proa's packages, as an installation would: engine and gateway read their own."""
    for package in _PACKAGES[:3]:
        project = tomllib.loads((_ROOT / package / "pyproject.toml").read_text())["project"]
        name, version = project["name"], project["version"]
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _environment(env: dict[str, str], site: Path, scratch: Path) -> dict[str, str]:
    """Programs find the packages where they lie, and then what else the caller has; and, as in the images, compiled
    files of Python, which the preflight writes into a folder of their own."""
    paths = [str(_ROOT / package) for package in _PACKAGES] + [str(site), os.environ.get("PYTHONPATH", "")]
    given = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    places = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    places["PYTHONPYCACHEPREFIX"] = os.environ.get("PYTHONPYCACHEPREFIX") or str(scratch / "compiled")
    return given | env | places | {"PYTHONUNBUFFERED": "1"}


def checked_out() -> str:
    """The commit of the working tree, with a + if files differ from it; empty if there is no git, or no repository."""
    try:
        command = ["git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+"]
        return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--call", type=int, choices=range(1, len(calls()) + 1), help="a part of ten minutes (default: all)"
    )
    parser.add_argument("--stages", nargs="*", metavar="NAME", help="only these stages")
    parser.add_argument("--earlier", nargs="*", type=Path, default=[], metavar="FOLDER", help="results of other runs")
    parser.add_argument("--again", nargs="*", default=[], metavar="STAGE/WORKLOAD", help="patterns: measure these anew")
    parser.add_argument("--commit", default=checked_out(), help="of the records (default: git's answer, %(default)s)")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds that all of it may take (%(default)s)")
    parser.add_argument(
        "--small", nargs=2, type=Path, metavar=("MODEL", "TESTS"), help="the call with tiny ones, on a CPU"
    )
    arguments = parser.parse_args(argv)
    steps = steps_of(arguments.call, alone=arguments.small is not None)
    if arguments.small:
        steps = [in_small(step, *arguments.small) for step in steps]
    if unknown := set(arguments.stages or ()) - {step.stage for step in steps}:
        names = ", ".join(dict.fromkeys(step.stage for step in steps))
        parser.error(f"there is no stage {min(unknown)}; there are {names}")
    signal.signal(signal.SIGTERM, _leave)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    earlier = [read_stages(folder.resolve()) for folder in (*arguments.earlier, out)]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        reporter = stack.enter_context(closing(Reporter(out.resolve(), arguments.limit, scratch)))
        # A machine that runs tests may be busy with others.
        reporter.run(replace(PREFLIGHT, seconds=240.0) if arguments.small else PREFLIGHT)
        reporter.results = results = Results(out.resolve(), reporter.results.stages, arguments.commit)
        if not arguments.small and results.missing("preflight", ["gpu", "engine"]):
            reporter.say("there is no GPU here, or something is missing that everything needs; nothing was measured")
            return 1
        for stages in earlier:
            if stages and gpu_of(stages) != gpu_of(results.stages):
                reporter.say(f"earlier results of {gpu_of(stages)} are left out")
            else:
                results.join(stages, arguments.again)
        for step in steps:
            if not arguments.stages or step.stage in arguments.stages:
                reporter.run(step)
                (out / "report.md").write_text(report(results.stages, yardstick()))
    print(tables(results.stages, yardstick()))
    return 0


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
