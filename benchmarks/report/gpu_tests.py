"""Run GPU tests in several processes, with a JSON record that is renewed every second.

    python3 -m benchmarks.report.gpu_tests --workloads tests/gpu/test_*.py --json FILE

Set PYTHONPATH as `make test-gpu` does. A test that takes too long ends its process, and so does one after which the
device cannot be used (`support.gpu_session`); pytest-xdist starts another one for the tests behind it. Tests that
passed or were skipped in `--earlier`, a file that this program wrote, are not run.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Lock, Timer
from typing import Any

import pytest

from benchmarks.records import write_json

_WRITE_SECONDS = 1.0  # from a result to the record that has it: who follows the records reads all of each
_INI = Path(__file__).parents[2] / "tests" / "gpu" / "pytest.ini"


class Recorder:
    """A pytest plugin that records results by file. `complete`: all tests of the file have run, and none failed."""

    def __init__(self, files: Sequence[str], earlier: dict[str, Any], path: Path | None) -> None:
        self._path = path
        self._lock = Lock()
        self._timer: Timer | None = None  # until it writes the results of the last second
        self.records: dict[str, dict[str, Any]] = {
            file: {"passed": [], "skipped": [], "failed": {}, "complete": False} for file in files
        }
        for file, record in self.records.items():
            for kind in ("passed", "skipped"):
                record[kind] += earlier.get(file, {}).get(kind, [])

    def known(self) -> set[str]:
        """Names of the tests that need not be run, `file name::test name`."""
        return {
            f"{Path(file).name}::{name}"
            for file, record in self.records.items()
            for name in (*record["passed"], *record["skipped"])
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, name = report.nodeid.partition("::")
        record = self._record(file)
        with self._lock:
            if report.failed:  # the first failure: if the process has ended since, that is reported too
                record["failed"].setdefault(name, str(report.longrepr)[-2000:])
            elif report.skipped:
                record["skipped"].append(name)
            elif report.when == "call":
                record["passed"].append(name)
            if self._timer is None:
                self._timer = Timer(_WRITE_SECONDS, self._write)
                self._timer.start()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # before all results
            self._record(report.nodeid)["failed"]["collection"] = str(report.longrepr)[-2000:]

    def finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            for record in self.records.values():
                record["complete"] = not record["failed"]
        self._write()

    def _record(self, file: str) -> dict[str, Any]:
        return next(record for known, record in self.records.items() if Path(known).name == Path(file).name)

    def _write(self) -> None:
        with self._lock:
            self._timer = None
            if self._path is not None:
                write_json(self._path, {"records": self.records})


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", metavar="FILE", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds that a test may take (%(default)s)")
    parser.add_argument("--enforce-eager", action="store_true", help="engines capture no CUDA graphs")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 even if tests failed, which the record shows; not 0 if they could not run."""
    arguments = parser().parse_args(argv)
    earlier = json.loads(arguments.earlier.read_text())["records"] if arguments.earlier else {}
    recorder = Recorder(arguments.workloads, earlier, arguments.json)
    options = [
        "-c",
        str(_INI),
        f"--rootdir={Path(arguments.workloads[0]).resolve().parent}",
        "-v",
        "--continue-on-collection-errors",
    ]
    # In small chunks, or the first process would get a share of the tests that come first, and run them one by one.
    options += ["-n", str(arguments.processes), "--dist=load", "--maxschedchunk=2", "--max-worker-restart=1000"]
    options += [f"--timeout={arguments.timeout:g}", "--timeout-method=thread"]
    options += ["--enforce-eager"] if arguments.enforce_eager else []
    options += [f"--known={name}" for name in sorted(recorder.known())]
    status = pytest.main([*options, *arguments.workloads], plugins=[recorder])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(status)
    recorder.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
