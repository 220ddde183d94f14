"""docs/traces.md has every span and every attribute of Proa's own, and no page names others."""

import re
from itertools import chain

from support.documentation import ROOT

PAGE = (ROOT / "docs/traces.md").read_text()
SOURCE = "".join(
    path.read_text()
    for path in chain(*(ROOT.glob(f"{folder}/**/*.py") for folder in ("engine/proa_engine", "services/gateway")))
)
SPANS = {*re.findall(r'(?:\bstart_span|\.span|\.part)\("([\w.]+)"', SOURCE), "queue", "prefill", "decode"}
_ATTRIBUTE = r"proa\.[\w.]+"
ATTRIBUTES = {
    *re.findall(rf'"({_ATTRIBUTE})": ', SOURCE),
    *re.findall(rf'(?:set_attribute\(|attributes\[)"({_ATTRIBUTE})"', SOURCE),
}


def test_the_page_has_all_spans_and_attributes() -> None:
    assert {name for name in SPANS | ATTRIBUTES if f"`{name}`" not in PAGE} == set()


def test_all_attributes_that_pages_name_exist() -> None:
    named = {
        name
        for page in ROOT.glob("docs/*.md")
        for line in page.read_text().splitlines()
        if line.startswith("| `")  # a row of a table of spans
        for name in re.findall(r"`(proa\.(?:kv|routing|request|step|worker|prefill)\.\w+)`", line)
    }

    assert named
    assert named <= ATTRIBUTES
