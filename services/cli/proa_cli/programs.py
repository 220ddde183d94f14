"""Runs programs beside each other: their output with names in front, and an end that leaves none behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL


class Program:
    """A program in a process group of its own. Its output is printed line by line with its name."""

    def __init__(self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.last_line = ""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        self._printer = threading.Thread(target=self._print, daemon=True)
        self._printer.start()

    def signal(self, number: int) -> None:
        """Send a signal to the process group, which includes the program's children."""
        with contextlib.suppress(ProcessLookupError):  # the group has exited
            os.killpg(self.process.pid, number)

    def wait(self, deadline: float) -> bool:
        """Wait until the program exits. Returns False if it still runs at `deadline`, on the monotonic clock."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        self._printer.join(timeout=1)
        return True

    def _print(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip()
            self.last_line = text or self.last_line
            print_line(f"{self.name:7} | {text}")


def stop(programs: Sequence[Program]) -> None:
    """Send SIGTERM to all programs, the last one first, wait, then SIGKILL to what is left of each process group."""
    deadline = time.monotonic() + GRACE_SECONDS
    for program in reversed(programs):
        program.signal(signal.SIGTERM)
    for program in programs:
        if not program.wait(deadline):
            print_line(f"proa: the {program.name} does not exit and is killed", sys.stderr)
        program.signal(signal.SIGKILL)


def print_line(line: str, stream: TextIO = sys.stdout) -> None:
    """Print a line in one write, because several threads print."""
    stream.write(f"{line}\n")
    stream.flush()
