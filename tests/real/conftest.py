"""Figures of a real model: tests record them, and the end of the run prints them as a table, also into
build/real-model-report.md."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support import real_model
from support.real_model import Record

REPORT = real_model.FOLDER.with_name("real-model-report.md")
_PROPERTY = "figure"
_BEGAN = pytest.StashKey[float]()


def pytest_sessionstart(session: pytest.Session) -> None:
    if not real_model.FOLDER.is_dir():
        raise pytest.UsageError(f"there is no model in {real_model.FOLDER}: `make real` fetches it")
    session.config.stash[_BEGAN] = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Passes over long prompts take seconds, and minutes on a busy machine."""
    for item in items:
        item.add_marker(pytest.mark.timeout(900))


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Add a row to the report: what was measured, and the figures."""
    return lambda what, figures: record_property(_PROPERTY, [what, figures])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = list(_rows(terminalreporter))
    if not rows:
        return
    seconds = time.monotonic() - config.stash[_BEGAN]
    table = ["| | |", "|---|---|", *(f"| {what} | {figures} |" for what, figures in rows)]
    REPORT.write_text("\n".join([*table, ""]))
    terminalreporter.section("figures of the real model")
    for what, figures in rows:
        terminalreporter.write_line(f"{what:60} {figures}")
    terminalreporter.write_line(f"{seconds:.0f} s in all; the table is in build/{REPORT.name}")


def _rows(terminalreporter: Any) -> Iterator[list[str]]:
    """In the order of the tests in their files, whichever process ran them."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, ())]
    for report in sorted(reports, key=lambda each: each.location[:2]):
        yield from (value for name, value in report.user_properties if name == _PROPERTY)
