"""The output of several programs and of `proa` itself, as lines of text or of JSON."""

import json
import re
import sys
import time
from typing import Protocol, TextIO

from proa.logs import Format, Level, json_line

_ERROR = re.compile(r"proa-(?:engine|gateway)(?: serve)?: error: (.+)")


class Output(Protocol):
    def of_program(self, name: str, line: str) -> None:
        """Print a line that a program has written."""
        ...

    def own(self, message: str, *, level: Level = "info") -> None:
        """Print a message of `proa`, warnings and errors to the standard error."""
        ...

    def error_of(self, line: str) -> str:
        """Return the reason why a program exits, if this is the line that says it."""
        ...

    def message_of(self, line: str) -> str:
        """Return the message of a line that a program has written."""
        ...


class TextOutput:
    """Lines have the name of their program in front."""

    def of_program(self, name: str, line: str) -> None:
        print_line(f"{name:7} | {line}")

    def own(self, message: str, *, level: Level = "info") -> None:
        if level == "info":
            print_line(f"proa: {message}")
        else:
            print_line(f"proa serve: {message}", sys.stderr)

    def error_of(self, line: str) -> str:
        match = _ERROR.fullmatch(line)
        return match[1] if match else ""

    def message_of(self, line: str) -> str:
        return line


class JsonOutput:
    """Lines are JSON objects with the field `program`. What a program writes in another form becomes a message."""

    def of_program(self, name: str, line: str) -> None:
        print_line(line if _read(line) else json_line(time.time(), "info", line, {"program": name}))

    def own(self, message: str, *, level: Level = "info") -> None:
        stream = sys.stdout if level == "info" else sys.stderr
        print_line(json_line(time.time(), level, message, {"program": "proa"}), stream)

    def error_of(self, line: str) -> str:
        record = _read(line)
        if record.get("level") == "critical" and "exception" not in record:  # whose stack is to be printed
            return str(record["message"])
        return TextOutput().error_of(line)

    def message_of(self, line: str) -> str:
        """The message, with the last line of the stack if there is one."""
        record = _read(line)
        stack = str(record.get("exception", "")).splitlines()
        return ": ".join([str(record.get("message", line)), *stack[-1:]])


def make_output(format: Format) -> Output:
    return JsonOutput() if format == "json" else TextOutput()


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line in one write, because several threads print."""
    stream = stream or sys.stdout
    stream.write(f"{line}\n")
    stream.flush()


def _read(line: str) -> dict[str, object]:
    """The object of a line of a log in JSON; empty if it is none."""
    if not line.startswith('{"time": '):
        return {}
    try:
        record: dict[str, object] = json.loads(line)
    except ValueError:
        return {}
    return record
