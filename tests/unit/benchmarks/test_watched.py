"""Programs under limits: what they print is kept, and one that hangs is ended with all that it started."""

import os
import sys
import time
from pathlib import Path

import psutil

from benchmarks.report.watched import Outcome, run_watched


def watch(program: str, *, seconds: float = 60.0, silence: float = 60.0) -> tuple[Outcome, list[str]]:
    lines: list[str] = []
    command = [sys.executable, "-c", program]
    outcome = run_watched(
        command, folder=Path.cwd(), env=os.environ, seconds=seconds, silence=silence, on_line=lines.append
    )
    return outcome, lines


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_program_that_ends_well_has_no_problem() -> None:
    outcome, lines = watch("print('one'); print('two')")
    assert (outcome.problem, outcome.tail, lines) == (None, ["one", "two"], ["one", "two"])


def test_a_program_that_fails_is_told_with_what_it_printed_last() -> None:
    outcome, _ = watch("raise SystemExit('no room')")
    assert outcome == Outcome("ended with status 1", ["no room"])


def test_a_silent_program_is_ended_with_its_children() -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, 'begins', sep='\\n', end='', flush=True)\n"
        "time.sleep(600)"
    )
    outcome, lines = watch(program, silence=2.0)
    assert (outcome.problem, outcome.tail[-1]) == ("no output for 2 s", "begins")
    while runs(int(lines[0])):
        time.sleep(0.05)


def test_a_program_that_never_stops_talking_is_ended_in_time() -> None:
    outcome, _ = watch("import time\nwhile True: print('on and on', flush=True); time.sleep(0.05)", seconds=2.0)
    assert outcome.problem == "ran past 2 s"
