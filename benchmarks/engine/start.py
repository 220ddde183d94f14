"""What a start of `proa serve` takes: wall time until it is ready, and CPU time of each of its processes until then.

    python -m benchmarks.engine.start --rounds 9
    python -m benchmarks.engine.start --rounds 9 --against ../other-checkout  # alternates between the two
    python -m benchmarks.engine.start --imports 12                      # the packages whose modules take longest

Wall times are from the start of `proa` to the line of its output that says it, CPU times user and system time until
`proa` says that it is ready: medians, the least and the most. Other load on the machine changes wall times most.
"""

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("protos", "services/gateway", "engine", "services/cli")
_MARKS = {
    "engine listens": re.compile(r"engine +\| .*, loading .*, listening on "),
    "gateway listens": re.compile(r"gateway +\| .* listening on "),
    "torch imported": re.compile(r"engine +\| .*(loading [0-9.]+ GB of weights|making random weights)"),
    "weights loaded": re.compile(r"engine +\| .*weights loaded in "),
    "warmed up": re.compile(r"engine +\| .*warmed up in "),
    "engine ready": re.compile(r"engine +\| .*ready after "),
    "engine connected": re.compile(r"gateway +\| .*engine connected: "),
    "ready": re.compile(r"proa: ready after "),
}
_IMPORT = re.compile(r"(engine|gateway) +\| import time: +(\d+) \| +\d+ \| +([\w.]+)")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds. `seconds`: of each of `_MARKS`. `cpu`: by program."""

    seconds: Mapping[str, float]
    cpu: Mapping[str, float]


@dataclass(slots=True)
class Checkout:
    """A folder with Proa's packages, and the starts that were measured there."""

    root: Path
    starts: list[Start] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(str(self.root / package) for package in _PACKAGES)
        # As in the Makefile: without compiled files an engine's imports take a second more.
        kept = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**kept, "PYTHONPATH": path}


def start(environment: Mapping[str, str], flags: Sequence[str]) -> tuple[Start, list[str]]:
    """Run `proa serve` until it is ready. Returns its lines too. Raises `RuntimeError` if it ends before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "proa_cli", "serve", *flags, "--host=127.0.0.1", f"--port={port}"]
    seconds, lines = dict[str, float](), list[str]()
    # Not in the repository's folder: `-m` would find modules there first.
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        program = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert program.stdout is not None
            for line in program.stdout:
                now = time.monotonic() - started
                lines.append(line.rstrip())
                for name, pattern in _MARKS.items():
                    if name not in seconds and pattern.match(line):
                        seconds[name] = now
                if "ready" in seconds:
                    return Start(seconds, cpu_times(program.pid)), lines
            raise RuntimeError("\n".join(["it ended before it was ready:", *lines]))
        finally:
            program.send_signal(signal.SIGTERM)
            program.communicate()


def cpu_times(pid: int) -> dict[str, float]:
    """CPU seconds of a process and its children, which includes children of theirs that have exited."""
    times = {"proa": _cpu_time(pid)}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(int(entry.name)) == pid:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            name = next((word for word in words if word.startswith(b"proa_")), words[0]).decode()
            times[name.removeprefix("proa_")] = _cpu_time(int(entry.name))
    return times


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the program's name, from the state, which proc(5) calls the third."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int | None:
    try:
        return int(_stat(pid)[1])
    except OSError:  # the process has exited
        return None


def _cpu_time(pid: int) -> float:
    return sum(map(int, _stat(pid)[11:15])) / _TICKS


def print_table(checkouts: Sequence[Checkout]) -> None:
    for title, unit in (("seconds", "wall"), ("cpu", "CPU")):
        print(f"\n| {unit}, s | " + " | ".join(str(each.root) for each in checkouts) + " |")
        print("|---|" + "---:|" * len(checkouts))
        for name in dict.fromkeys(name for each in checkouts for run in each.starts for name in getattr(run, title)):
            cells = (_summary([getattr(run, title).get(name) for run in each.starts]) for each in checkouts)
            print(f"| {name} | " + " | ".join(cells) + " |")


def _summary(seconds: Sequence[float | None]) -> str:
    """None: in that start, a line arrived after `proa` said that it was ready."""
    values = [each for each in seconds if each is not None]
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def print_imports(lines: Sequence[str], most: int) -> None:
    """Print the packages of each program whose modules take longest, in milliseconds. `lines`: with the output of
    Python's `-X importtime`, which makes each import slower."""
    for program in ("engine", "gateway"):
        times = Counter[str]()
        for name, microseconds in _imports(lines, program):
            times[name.partition(".")[0]] += microseconds
        print(f"\n{program}: {sum(times.values()) / 1000:.0f} ms of imports")
        for name, microseconds in times.most_common(most):
            print(f"  {microseconds / 1000:7.0f}  {name}")


def _imports(lines: Sequence[str], program: str) -> Iterator[tuple[str, int]]:
    for line in lines:
        match = _IMPORT.match(line)
        if match and match[1] == program:
            yield match[3], int(match[2])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--against", type=Path, help="another checkout, measured in the same rounds")
    parser.add_argument("--imports", type=int, metavar="N", help="list the N slowest packages of one start instead")
    parser.add_argument("flags", nargs="*", default=["builtin"], help="of `proa serve`, behind `--`")
    arguments = parser.parse_args(argv)
    ours = Checkout(_ROOT)
    if arguments.imports:
        environment = {**ours.environment, "PYTHONPROFILEIMPORTTIME": "1"}
        print_imports(start(environment, arguments.flags)[1], arguments.imports)
        return
    checkouts = [ours, *([Checkout(arguments.against.resolve())] if arguments.against else [])]
    for checkout in checkouts:  # compiles what Python has not compiled yet, and brings the files into memory
        start(checkout.environment, arguments.flags)
    for _ in range(arguments.rounds):
        for checkout in checkouts:
            checkout.starts.append(start(checkout.environment, arguments.flags)[0])
    load = os.getloadavg()[1]
    cores = len(os.sched_getaffinity(0))
    print(f"medians of {arguments.rounds} rounds, {cores} cores, load average of 5 minutes {load:.1f}")
    print_table(checkouts)


if __name__ == "__main__":
    main(sys.argv[1:])
