"""The page about starts that fail quotes messages as they are in the code."""

import re
from itertools import chain

import pytest

from support.documentation import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)` \| ", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def code() -> str:
    files = chain((ROOT / "engine/proa_engine").rglob("*.py"), (ROOT / "protos/proa").rglob("*.py"))
    text = "\n".join(file.read_text() for file in sorted(files))
    return re.sub(r'"\s*\n\s*f?"', "", text)  # literals of several lines


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 30


@pytest.mark.parametrize("message", MESSAGES)
def test_each_message_is_in_the_code(message: str, code: str) -> None:
    for part in message.split("…"):
        assert part.strip() in code, part
