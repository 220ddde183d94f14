"""The architecture page names files and functions that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STOPS = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)


def test_the_page_has_a_stop_for_each_step() -> None:
    assert len(STOPS) > 20


@pytest.mark.parametrize(("file", "function"), STOPS)
def test_each_stop_exists(file: str, function: str) -> None:
    text = (ROOT / file).read_text()
    *owner, name = function.split(".")
    assert re.search(rf"^ *(async )?def {name}\b", text, re.MULTILINE), f"{file} has no function {name}"
    assert not owner or f"class {owner[0]}" in text, f"{file} has no class {owner[0]}"
