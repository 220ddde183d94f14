"""Check what a machine has of what a GPU report needs, in seconds: packages, the GPU, and whether everything imports.

    python3 -m benchmarks.report.preflight

- `packages`: what the three packages and the tests depend on, by its installed version. Shown, never fatal.
- `gpu`: a GPU, a C compiler and Python's headers, with which Triton compiles its launchers.
- `peer`: whether there is another engine to compare with.
- `engine`, `tests`, `http`: whether these import what they begin with. Where Python may write compiled files, they are
  there afterwards.

A record is `complete` if nothing is amiss. Set PYTHONPATH as `make test-gpu` does.
"""

import argparse
import importlib
import importlib.util
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.records import Recording

_ROOT = Path(__file__).parents[2]
_PROJECTS = ("protos", "engine", "services/gateway")
_FOR_TESTS = ("pytest>=8", "pytest-timeout>=2", "pytest-xdist>=3", "transformers>=5", "msgspec>=0.19")
_BENCHMARKS = (
    "engine.speed",
    "engine.engine_profile",
    "kernels.decode_attention",
    "kernels.prefill_attention",
    "kernels.skinny_gemm",
    "report.gpu_tests",
)
# In a process of its own, in which it replaces a module of torch.
_COMPILING = "from proa_engine.worker.compile_kernels import prepare_meta_tensors as prepare; prepare()"
_ADAPTER = "proa_engine.models.transformers_adapter"
_REQUIREMENT = re.compile(r"([A-Za-z0-9-]+)(?:>=([0-9.]+))?")


def packages() -> dict[str, Any]:
    """Wanted and found versions. Proa's own need no installation: they are found on PYTHONPATH."""
    rows, problems = [], []
    for requirement in requirements():
        match = _REQUIREMENT.match(requirement)
        assert match, requirement
        name, wanted = match[1], match[2] or ""
        found = installed(name)
        is_good = found is not None and numbers(found) >= numbers(wanted)
        rows.append([name, wanted, found or "missing", "" if is_good else "<-"])
        if not is_good:
            problems.append(f"{name} {found or 'is missing'}" + (f", wanted {wanted}" if wanted else ""))
    for row in rows:
        print(" ".join(f"{cell:30}" for cell in row).rstrip())
    return {"packages": rows, "problems": problems}


def requirements() -> list[str]:
    """Of the three packages, from their pyproject.toml, and of the tests."""
    wanted = [*_FOR_TESTS]
    for project in _PROJECTS:
        document = tomllib.loads((_ROOT / project / "pyproject.toml").read_text())
        wanted += [each for each in document["project"]["dependencies"] if not each.startswith("proa-")]
    return sorted(set(wanted))


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]


def gpu() -> dict[str, Any]:
    import torch

    problems = []
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        problems.append("there is no C compiler")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        problems.append(f"there is no {sysconfig.get_path('include')}/Python.h")
    record: dict[str, Any] = {"name": f"{platform.machine()} without a GPU", "compiler": compiler}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        record["name"] = properties.name
        free, total = torch.cuda.mem_get_info()
        record |= {"multiprocessors": properties.multi_processor_count, "capability": properties.major}
        record |= {"free_gib": round(free / 2**30, 1), "total_gib": round(total / 2**30, 1)}
    else:
        problems.append("torch sees no GPU")
    return record | {"cores": len(os.sched_getaffinity(0)), "problems": problems}


def imports(names: Iterable[str]) -> dict[str, Any]:
    problems = []
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
    return {"problems": problems}


def modules_of(package: str) -> Iterator[str]:
    """All modules of a package, found without importing them."""
    found = importlib.util.find_spec(package)
    places = None if found is None else found.submodule_search_locations
    assert places is not None, f"{package} is not on PYTHONPATH"
    for module in pkgutil.walk_packages(places, f"{package}."):
        yield module.name


def engine() -> dict[str, Any]:
    """All that a report may launch. Models through transformers are no part of it, and their adapter needs a newer
    transformers than the tests: the engine imports it when such a model is loaded."""
    parts = (name for part in ("kernels", "layers", "models") for name in modules_of(f"proa_engine.{part}"))
    packages = (name for name in parts if not name.startswith(_ADAPTER))
    programs = ("proa_engine.offline.llm", "proa_engine.executor.multiproc", "proa_engine.worker.compile_kernels")
    record = imports((*packages, *programs, *(f"benchmarks.{name}" for name in _BENCHMARKS)))
    if subprocess.run([sys.executable, "-c", _COMPILING], check=False).returncode:
        record["problems"].append("the program that compiles kernels cannot import what it needs")
    return record


def tests() -> dict[str, Any]:
    """What runs them, and the first of them; a file that cannot be imported fails alone."""
    sys.path.append(str(_ROOT / "tests/gpu"))
    return imports(["pytest", "xdist", "pytest_timeout", "test_gpu_smoke"])


def http() -> dict[str, Any]:
    record = imports(
        ["proa_engine.cli", "proa_engine.server.serve", "proa_gateway.cli", "proa_gateway.app", "benchmarks.http.serve"]
    )
    for name in ("proa-engine", "proa-gateway"):  # they tell their version
        if installed(name) is None:
            record["problems"].append(f"{name} is not installed, and has no metadata on PYTHONPATH")
    return record


def peer() -> dict[str, Any]:
    """Another engine, whose own start shows whether it works: importing it takes many seconds."""
    return {"problems": [] if importlib.util.find_spec("vllm") else ["vllm is not installed"]}


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "packages": packages,
    "gpu": gpu,
    "engine": engine,
    "tests": tests,
    "http": http,
    "peer": peer,
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--json", type=Path)
    return parser


def main(argv: Sequence[str]) -> None:
    arguments = parser().parse_args(argv)
    recording = Recording(arguments.json)
    for name in arguments.workloads:
        started = time.monotonic()
        record = CHECKS[name]()
        record |= {"complete": not record["problems"], "took": round(time.monotonic() - started, 1)}
        recording.add(name, record)
        shown = "; ".join(record["problems"]) or "good"
        print(f"{name}: {shown} ({record['took']} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
