"""`proa chat` in a terminal: lines are edited, Ctrl-C stops an answer and keeps the conversation, Ctrl-D ends."""

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.processes import fake_engine_process, gateway_process

ARROW_LEFT = "\x1b[D"
CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    words = ("--text", "again and ", "--repeat", "--step-delay", "0.02")
    with fake_engine_process(*words) as (_, engine), gateway_process(engine) as (_, port):
        yield f"http://127.0.0.1:{port}/v1"


def _begin_session() -> None:
    """The standard input becomes the session's terminal, whose Ctrl-C counts also if the tests run in the background,
    where a shell ignores it."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program with a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_begin_session,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(slave)
        self.printed = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, text: str) -> None:
        """Drops what was printed before."""
        assert self.shows(text, seconds=60), self.printed

    def shows(self, text: str, *, seconds: float) -> bool:
        """Whether it prints `text` without a pause of so many seconds. Drops what was printed before."""
        self.printed = ""
        while text not in self.printed:
            if not select.select([self._master], [], [], seconds)[0]:
                return False
            self.printed += os.read(self._master, 4096).decode()
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(url: str) -> None:
    terminal = Terminal(sys.executable, "-m", "proa_cli", "chat", "--url", url)
    try:
        terminal.read_until("> ")
        terminal.type(f"Hell!{ARROW_LEFT}o\r")
        terminal.read_until("again and again")
        terminal.type(CTRL_C)
        terminal.read_until("> ")
        terminal.type("And now?\r")
        terminal.read_until("again and again")
        terminal.type(CTRL_C)
        terminal.read_until("> ")
        # Without an answer it drops the line. Python's input() does not see one that comes while it begins to wait.
        terminal.type(CTRL_C)
        while not terminal.shows("> ", seconds=5):
            terminal.type(CTRL_C)
        terminal.type(CTRL_D)
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()


def test_commands_are_obeyed_and_lines_between_quotes_are_one_message(url: str) -> None:
    terminal = Terminal(sys.executable, "-m", "proa_cli", "chat", "--url", url)
    try:
        terminal.read_until("> ")
        terminal.type("/help\r")
        terminal.read_until("> ")
        assert "/clear" in terminal.printed
        terminal.type("/set max-tokens 30\r")
        terminal.read_until("> ")
        for text, prompt in (('"""one\r', ". "), ("/help\r", ". "), ('two"""\r', "> ")):
            terminal.type(text)
            terminal.read_until(prompt)
        assert "again and again" in terminal.printed
        assert "at the limit of its length" in terminal.printed
        terminal.type('"""dropped\r')
        terminal.read_until(". ")
        terminal.type(CTRL_C)
        while not terminal.shows("> ", seconds=5):
            terminal.type(CTRL_C)
        terminal.type("/bye\r")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()


def test_a_reader_that_ends_first_is_no_error(url: str) -> None:
    shell = '"$0" -m proa_cli chat --url "$1" -q Hello | head -c 9; exit ${PIPESTATUS[0]}'
    done = subprocess.run(["bash", "-c", shell, sys.executable, url], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "again and", "")
