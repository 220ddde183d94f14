"""Run the GPU tests, with a JSON record that is complete after every test, in case the run is cut off.

    python3 tests/benchmarks/gpu_tests.py --workloads tests/gpu/test_*.py --json FILE

Set PYTHONPATH as `make test-gpu` does.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_INI = Path(__file__).parents[1] / "gpu" / "pytest.ini"
_PROCESSES = 8  # most of the time is spent on compiling


class Recorder:
    """A pytest plugin that records results by file. `complete`: all tests of the file have run."""

    def __init__(self, files: Sequence[str], path: Path | None) -> None:
        self._path = path
        self.records: dict[str, dict[str, Any]] = {
            file: {"passed": 0, "skipped": 0, "failed": {}, "complete": False} for file in files
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, name = report.location
        record = next(record for known, record in self.records.items() if Path(known).name == Path(file).name)
        if report.failed:
            record["failed"][name] = str(report.longrepr)[-2000:]
        elif report.skipped:
            record["skipped"] += 1
        elif report.when == "call":
            record["passed"] += 1
        self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            for file, record in self.records.items():
                if Path(file).name == Path(report.nodeid).name:
                    record["failed"]["collection"] = str(report.longrepr)[-2000:]

    def finish(self) -> None:
        for record in self.records.values():
            record["complete"] = True
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps({"records": self.records}, indent=1))


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 even if tests failed, which the record shows; not 0 if they could not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", metavar="FILE", required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    recorder = Recorder(arguments.workloads, arguments.json)
    parallel = ["-n", str(_PROCESSES)] if importlib.util.find_spec("xdist") and len(arguments.workloads) > 1 else []
    options = ["-c", str(_INI), "-v", "--continue-on-collection-errors", *parallel]
    status = pytest.main([*options, *arguments.workloads], plugins=[recorder])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)
    recorder.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
