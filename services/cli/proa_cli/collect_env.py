"""`proa collect-env`: versions, machine, GPUs and variables, for bug reports.

Reads files and asks programs; imports no torch. What is missing is said to be so.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

from proa.options import MASK, is_secret
from proa.plugins import by_package

_OURS = ("proa", "proa-engine", "proa-gateway", "proa-protos")
_LIBRARIES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "llguidance"),
    *("grpcio", "protobuf", "numpy", "pillow", "av", "soxr", "fastapi", "uvicorn", "aiohttp", "kubernetes"),
    "prometheus-client",
)
_CPU_FLAGS = re.compile(r"avx2|avx512\w*|amx_\w+|avx_vnni|f16c|fma|asimd\w*|sve\w*|bf16|i8mm")
_VARIABLES = re.compile(
    r"(?:PROA|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|HF|GRPC|OTEL)_\w+|\w+_NUM_THREADS|LD_LIBRARY_PATH"
)
_GPU_FIELDS = ("index", "name", "memory.total", "compute_cap", "driver_version", "mig.mode.current")
_SECONDS = 30.0  # for a program

Lines = Iterator[tuple[str, str]]


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    parser.parse_args(words)
    sections = {
        "Versions": _versions(),
        "Plugins": iter(by_package().items()),
        "Machine": _machine(Path("/")),
        "GPUs": _gpus(),
        "Environment": variables(os.environ),
    }
    print("\n\n".join(f"{title}\n{'-' * len(title)}\n{_table(lines)}" for title, lines in sections.items()))
    return 0


def variables(environment: Mapping[str, str]) -> Lines:
    """The variables that Proa and its libraries read, secrets and passwords of URLs masked."""
    for name, value in sorted(environment.items()):
        if _VARIABLES.fullmatch(name):
            hides = value and (is_secret(name) or name.endswith("_HEADERS"))
            yield name, MASK if hides else re.sub(r"//[^/@\s]+@", f"//{MASK}@", value)


def _table(lines: Lines) -> str:
    return "\n".join(f"{name}: {value}" for name, value in lines) or "none"


def _versions() -> Lines:
    for name in (*_OURS, *_LIBRARIES):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield "python", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield "torch's CUDA", _cuda_of_torch()
    names = {str(each.metadata["Name"]): each.version for each in distributions()}
    yield from sorted(each for each in names.items() if each[0].startswith("nvidia-"))


def _cuda_of_torch() -> str:
    """The CUDA version that torch was built for, from its file of versions: importing torch takes seconds."""
    spec = find_spec("torch")
    text = _read(Path(spec.origin).with_name("version.py")) if spec is not None and spec.origin else ""
    found = re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else "none"


def _machine(root: Path) -> Lines:
    yield "system", f"{_os_name(root)}, {platform.system()} {platform.release()} {platform.machine()}"
    yield "libc", " ".join(platform.libc_ver()) or "unknown"
    cpu = _read(root / "proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)", cpu, re.MULTILINE)
    yield "cpu", f"{models[0] if models else platform.processor() or 'unknown'}, {os.cpu_count()} threads"
    if hasattr(os, "sched_getaffinity"):
        yield "cpu threads of this process", str(len(os.sched_getaffinity(0)))
    flags = re.search(r"^(?:flags|Features)\s*: (.*)", cpu, re.MULTILINE)
    yield "cpu flags", " ".join(filter(_CPU_FLAGS.fullmatch, flags[1].split())) if flags else "unknown"
    memory = re.search(r"^MemTotal: +(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    yield "memory", f"{int(memory[1]) / 2**20:.1f} GiB" if memory else "unknown"
    yield "shared memory", _size(root / "dev/shm")
    yield "container", ", ".join(_containers(root)) or "none found"
    yield "C compiler", shutil.which("cc") or shutil.which("gcc") or "none"  # Triton's kernels need one
    for name in ("memory.max", "cpu.max"):
        yield f"limit {name}", _read(root / "sys/fs/cgroup" / name).strip() or "unknown"


def _os_name(root: Path) -> str:
    found = re.search(r'^PRETTY_NAME="?(.*?)"?$', _read(root / "etc/os-release"), re.MULTILINE)
    return found[1] if found else "unknown"


def _containers(root: Path) -> Iterator[str]:
    if (root / ".dockerenv").exists():
        yield "Docker"
    if (root / "run/.containerenv").exists():
        yield "Podman or buildah"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        yield "Kubernetes"


def _size(path: Path) -> str:
    try:
        found = os.statvfs(path)
    except OSError:
        return "unknown"
    return f"{found.f_blocks * found.f_frsize / 2**30:.1f} GiB"


def _gpus() -> Lines:
    listed = _output("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader")
    for line in listed.splitlines():
        index, *values = (value.strip() for value in line.split(","))
        yield (f"gpu {index}", ", ".join(values)) if values else ("nvidia-smi", line)
    if listed and "\n" in listed.strip():
        yield "links", "\n" + _output("nvidia-smi", "topo", "-m")


def _output(*command: str) -> str:
    """What a program prints, or in one line why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return " ".join(str(error).split())
    return done.stdout.rstrip() if done.returncode == 0 else " ".join((done.stdout + done.stderr).split())


def _read(path: Path) -> str:
    """The text of a file, empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
