"""Each table of figures on the performance page says where its raw data is, and each file of it how it was made."""

import re

import pytest

from support.documentation import ROOT

MEASURED = ROOT / "docs" / "measured"
FILES = {str(path.relative_to(MEASURED)) for path in MEASURED.rglob("*.json")}
DESCRIPTIONS = ("| call |", "| workload |", "| what |")  # tables without figures
RULE = re.compile(r"^ *\|[-:| ]+\|$", re.MULTILINE)  # below a table's titles
SOURCE = re.compile(r"Raw data: (?:not kept|\[`([^`]+)`\]\(measured/\1\))")


def tables() -> list[tuple[str, str]]:
    """The titles of each table of figures, and the first paragraph behind it that is not a table too."""
    text = re.sub(r"^<!--.*-->$", "", (ROOT / "docs" / "performance.md").read_text(), flags=re.MULTILINE)
    blocks = [block.strip() for block in re.split(r"\n\n+", text)]
    behind, found = "", []
    for block in reversed(blocks):
        if not RULE.search(block):
            behind = block
        elif not block.startswith(DESCRIPTIONS):
            found.append((block.partition("\n")[0], behind))
    return found


@pytest.mark.parametrize(("titles", "behind"), tables())
def test_a_table_of_figures_names_its_raw_data_or_says_that_it_is_not_kept(titles: str, behind: str) -> None:
    source = SOURCE.match(behind)
    assert source, titles
    assert source[1] is None or source[1] in FILES


def test_each_file_of_raw_data_has_its_command_hardware_date_and_commit() -> None:
    rows = re.findall(r"^\| \[`(.+)`\]\(\1\) \|(.*)\|$", (MEASURED / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == FILES
    for name, row in rows:
        command, hardware, date, commit = (cell.strip() for cell in row.split("|"))
        assert command, name
        assert re.search("NVIDIA|AMD|Intel", hardware), name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), name
        assert re.search(r"`[0-9a-f]{8}`|\d+\.\d+\.\d+", commit), name
