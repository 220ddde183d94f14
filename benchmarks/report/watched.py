"""Run a program with a limit on its time and one on the time without output; ends its whole process group."""

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TAIL = 40  # lines
_GRACE_SECONDS = 5.0
_TOO_LATE = "ran past"


@dataclass(frozen=True, slots=True)
class Outcome:
    problem: str | None  # None: exit status 0
    tail: list[str]  # last lines of its output
    out_of_time: bool = False  # ended at the limit on its time, while it still printed


def run_watched(
    command: Sequence[str],
    *,
    folder: Path,
    env: Mapping[str, str],
    seconds: float,
    silence: float,
    on_line: Callable[[str], None],
) -> Outcome:
    """Run `command` in `folder`. Limits are in seconds. `on_line` gets each line of its output."""
    program = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,  # not a new session: whatever ends this program's session ends the program too
    )
    tail: deque[str] = deque(maxlen=_TAIL)

    def take(line: str) -> None:
        tail.append(line)
        on_line(line)

    try:
        problem = _follow(program, seconds, silence, take)
        return Outcome(problem, list(tail), out_of_time=problem is not None and problem.startswith(_TOO_LATE))
    finally:
        _end(program)


def _follow(
    program: "subprocess.Popen[bytes]", seconds: float, silence: float, take: Callable[[str], None]
) -> str | None:
    assert program.stdout is not None
    started, rest = time.monotonic(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(program.stdout, selectors.EVENT_READ)
        while True:
            left = started + seconds - time.monotonic()
            if not selector.select(max(0.0, min(left, silence))):
                if rest:
                    take(rest.decode(errors="replace"))  # an unfinished line names what hangs
                return f"{_TOO_LATE} {seconds:.0f} s" if left <= silence else f"no output for {silence:.0f} s"
            data = os.read(program.stdout.fileno(), 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                take(line.decode(errors="replace"))
    with suppress(subprocess.TimeoutExpired):
        program.wait(_GRACE_SECONDS)
    return None if program.returncode == 0 else f"ended with status {program.returncode}"


def _end(program: "subprocess.Popen[bytes]") -> None:
    """End the process group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with suppress(subprocess.TimeoutExpired):
            program.wait(_GRACE_SECONDS)
    assert program.stdout is not None
    program.stdout.close()
