"""Runs programs beside each other: their output with names in front, and an end that leaves none behind."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from proa_cli.output import Output

EXIT_SECONDS = 10.0  # from the end of a program's work to its exit
_POLL_SECONDS = 0.1


class Program:
    """A program in a process group of its own. Its output is printed line by line."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        output: Output,
        drain_timeout: float = 0.0,
        *,
        given: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`drain_timeout`: seconds for which the program may work on after SIGTERM. `given`: its standard input.
        `environment`: in place of this process's."""
        self.name = name
        self._output = output
        self.drain_timeout = drain_timeout
        self.last_line = ""
        self.error = ""  # why the program exits, as it says in its last line, which is not printed
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if given else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:  # it may have exited
                stdin.write(given)
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

    def stop(self, hurries: Callable[[], bool]) -> None:
        """Send SIGTERM, wait until the program exits, then SIGKILL what is left of its process group. As soon as
        `hurries` returns True nothing is waited for."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.drain_timeout + EXIT_SECONDS
        while not self.wait(time.monotonic() + _POLL_SECONDS):
            if hurries() or time.monotonic() > deadline:
                self._output.own(f"the {self.name} does not exit and is killed", level="warning")
                break
        self.signal(signal.SIGKILL)

    def _print(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip()
            self.last_line = self._output.message_of(text) or self.last_line
            if error := self._output.error_of(text):
                self.error = error
                continue
            self._output.of_program(self.name, text)
