"""The preflight of the GPU report, with the packages of the machine that it is prepared for and no others."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.report.preflight import numbers, requirements
from support.only_packages import read_list

ROOT = Path(__file__).parents[3]
LISTS = ROOT / "tests" / "gpu"
PACKAGES = [ROOT / name for name in ("engine", "protos", "services/gateway", "services/cli", "tests", "")]
# Proa declares them; a report imports none of them.
NOT_NEEDED = {"kubernetes", "opentelemetry-sdk"} | {
    f"opentelemetry-exporter-otlp-proto-{way}" for way in ("grpc", "http")
}


# Modules of transformers 5.23 that the machine's 5.17 does not have.
HIDDEN = "-transformers.distributed.parallel_utils -transformers.distributed"


def check(folder: Path, wheels: str, workloads: list[str]) -> dict[str, Any]:
    """The problems that the preflight finds."""
    names = f"{LISTS / 'machine.txt'} {LISTS / wheels} {HIDDEN}"
    path = folder / "records.json"
    program = str(ROOT / "benchmarks" / "report" / "preflight.py")
    command = [sys.executable, "-m", "support.only_packages", names, program, f"--json={path}", "--workloads"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PACKAGES))}
    done = subprocess.run([*command, *workloads], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: record["problems"] for name, record in json.loads(path.read_text())["records"].items()}


def test_everything_but_http_is_imported_with_the_machines_packages_and_four_wheels(tmp_path: Path) -> None:
    problems = check(tmp_path, "wheels.txt", ["engine", "tests"])
    assert problems == {"engine": [], "tests": []}


def test_http_is_imported_with_the_wheels_for_it(tmp_path: Path) -> None:
    assert check(tmp_path, "wheels-http.txt", ["http"]) == {"http": []}


def test_a_package_that_the_machine_lacks_is_named(tmp_path: Path) -> None:
    problems = check(tmp_path, "wheels.txt", ["http"])["http"]
    assert "proa_engine.server.serve: ModuleNotFoundError: No module named 'grpc_health'" in problems


def test_the_machine_and_the_wheels_have_the_versions_that_proa_requires() -> None:
    there = read_list(LISTS / "machine.txt") | read_list(LISTS / "wheels-http.txt")
    wanted = {requirement.partition(">=")[0]: requirement.partition(">=")[2] for requirement in requirements()}
    assert wanted.keys() - there.keys() == NOT_NEEDED
    older = [
        name for name in wanted.keys() & there.keys() if there[name] and numbers(there[name]) < least(wanted[name])
    ]
    assert not older


def least(bounds: str) -> list[int]:
    """The lower bound of a requirement, which may be followed by others."""
    return numbers(bounds.partition(",")[0].partition(";")[0])
