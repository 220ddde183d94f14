"""Runs of other servers' own tests: in a folder of their own, by a process that has stand-ins for the server."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

INSIDE = "--inside"  # the first argument of the process in the folder
OPTIONS = ("-p", "no:cacheprovider", "-q", "-rfE", "--tb=line", "-W", "ignore", "--timeout=180", "--rootdir=.",
           "--continue-on-collection-errors")  # fmt: skip


def run_in(folder: Path, module: str, arguments: Sequence[str]) -> int:
    """Run the module in the folder, with `INSIDE` and pytest's arguments. Returns its status."""
    paths = [".", *map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep))]
    wide = {"COLUMNS": "250"}  # pytest cuts the errors of its summary to the terminal's width
    environment = os.environ | wide | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, INSIDE, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


class ChosenTests:
    """A pytest plugin that leaves only some tests."""

    def __init__(self, is_chosen: Callable[[pytest.Item], bool]) -> None:
        self._is_chosen = is_chosen

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if self._is_chosen(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
