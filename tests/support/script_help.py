"""Runs Python commands with `--help`, all in this process: they import mostly the same libraries, which takes seconds
in a process of its own. `script_help.py FILE` reads a list of commands as JSON, without the interpreter, and writes a
list of what they print to the same file."""

import io
import json
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path


def help_of(command: Sequence[str]) -> str:
    """What the command prints until it exits; with a traceback if it raises."""
    output, path = io.StringIO(), list(sys.path)
    with redirect_stdout(output):
        try:
            if command[0] == "-m":
                sys.argv = [command[1], *command[2:], "--help"]
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = [*command, "--help"]
                sys.path.insert(0, str(Path(command[0]).parent))
                runpy.run_path(command[0], run_name="__main__")
        except SystemExit:
            pass
        except Exception:
            traceback.print_exc(file=output)
        finally:
            sys.path[:] = path
    return output.getvalue()


if __name__ == "__main__":
    file = Path(sys.argv[1]).absolute()
    sys.path.pop(0)  # this folder, whose modules are not those of the commands
    file.write_text(json.dumps([help_of(command) for command in json.loads(file.read_text())]))
