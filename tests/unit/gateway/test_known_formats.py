"""A gateway knows its own formats and those of installed packages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from proa_gateway.parsing.choose import choose_format
from proa_gateway.parsing.format import Json, ToolFormat
from proa_gateway.parsing.formats import FORMATS
from proa_gateway.parsing.json_formats import HERMES
from proa_gateway.parsing.known_formats import BUILT_IN, known_formats
from support.documentation import ROOT
from support.plugins import on_path, with_example, write_package
from support.transcripts import Transcript, check_transcript

CODE = """
from proa_gateway.parsing.format import Json, ToolFormat

FINE = ToolFormat(
    name="x", signs=("<tool_call>",), call="<tool_call>$name $arguments", arguments=Json(), reasoning=("<r>", "</r>")
)
UNSIGNED = ToolFormat(name="x", signs=(), call="!$name $arguments", arguments=Json())
WITHOUT_ARGUMENTS = ToolFormat(name="x", signs=("!",), call="!$name", arguments=Json())
PAIR = ("<r>", "</r>")
"""


def reads_all(tool_format: ToolFormat) -> bool:
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with on_path(tmp_path):
        yield tmp_path


def test_without_packages_the_formats_are_the_gateways_own() -> None:
    assert known_formats() == BUILT_IN
    assert tuple(BUILT_IN.tools) == FORMATS


def test_the_page_of_formats_has_a_row_for_each() -> None:
    page = (ROOT / "docs/tool-formats.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .*? \| .*? \| (.*) \|$", page, re.MULTILINE)
    closings = {each.name: each.reasoning[1].strip() if each.reasoning else "" for each in FORMATS}
    closings |= {each.name: "in a channel" for each in FORMATS if each.channels}
    written = {name: closing.strip("` ").replace(r"\|", "|") for name, closing in rows}
    assert written == closings, "write a row for each format into docs/tool-formats.md"
    assert list(written) == sorted(written), "sort the rows"
    number = f"formats of {len(FORMATS)} model families"
    assert number in (ROOT / "README.md").read_text(), f"README.md must have '{number}'"


def test_formats_of_the_example_are_found_by_name_and_by_sign(tmp_path: Path) -> None:
    with with_example(tmp_path):
        known = known_formats()
        known.check("arrow", "thoughts")
        assert known.reasoning_format("thoughts") == ("<thoughts>", "</thoughts>")
        arrow = choose_format(None, None, "{{ '=>call ' + call.name }}", known, reads_all).tool_format
    assert arrow is not None
    assert arrow == known.tool_format("arrow")
    calls = [("weather", {"city": "Rome"}), ("clock", {})]
    text = '=>call weather {"city": "Rome"}\n=>call clock {}\n'
    check_transcript(arrow, Transcript(text, calls=calls, tools={"weather": {}, "clock": {}}))


def test_a_packages_format_has_the_name_of_its_entry_point_and_comes_first(folder: Path) -> None:
    write_package(folder, "plug_fine", {"proa.tool_formats": {"fine": "plug_fine:FINE"}}, code=CODE)
    known = known_formats()
    assert known.tools[0].name == "fine"
    assert known.reasoning_format("fine") == ("<r>", "</r>")
    found = choose_format(None, None, '<tool_call> "arguments" </think> </r>', known, reads_all).tool_format
    assert found is not None
    assert found.name == "fine"


def test_a_format_without_signs_is_only_chosen_by_its_name(folder: Path) -> None:
    write_package(folder, "plug_unsigned", {"proa.tool_formats": {"unsigned": "plug_unsigned:UNSIGNED"}}, code=CODE)
    known = known_formats()
    assert choose_format(None, None, "any", known, reads_all).tool_format is None
    named = choose_format("unsigned", None, "any", known, reads_all).tool_format
    assert named == ToolFormat(name="unsigned", signs=(), call="!$name $arguments", arguments=Json())


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("plug_bad:MISSING", "cannot be imported: AttributeError"),
        ("plug_bad:PAIR", "is not a proa_gateway.parsing.format.ToolFormat"),
        ("plug_bad:WITHOUT_ARGUMENTS", "is not a valid ToolFormat"),
    ],
)
def test_a_format_that_cannot_be_used_is_an_error_only_if_it_is_asked_for(
    entry: str, reason: str, folder: Path
) -> None:
    write_package(folder, "plug_bad", {"proa.tool_formats": {"bad": entry}}, code=CODE)
    known = known_formats()
    known.check("hermes", "qwen3")
    assert choose_format("hermes", None, "</think>", known, reads_all).tool_format is HERMES
    (failure,) = known.failures.values()
    assert failure.startswith(f"the tool format bad of the package plug_bad 1.0 ({entry}) {reason}")
    for names in (("bad", None), (None, "bad")):
        with pytest.raises(ValueError, match=r"the tool format bad of the package plug_bad 1\.0"):
            known.check(*names)


@pytest.mark.parametrize("name", ["hermes", "qwen3", "none"])
def test_a_reasoning_format_with_a_name_of_the_gateways_own_is_refused(name: str, folder: Path) -> None:
    write_package(folder, "plug_same", {"proa.reasoning_formats": {name: "plug_same:PAIR"}}, code=CODE)
    with pytest.raises(ValueError, match=f"plug_same 1.0 adds the reasoning format {name}, which Proa has itself"):
        known_formats()


def test_a_reasoning_format_is_a_pair_of_texts(folder: Path) -> None:
    entries = {"pair": "plug_pair:PAIR", "text": "plug_pair:CODE"}
    write_package(folder, "plug_pair", {"proa.reasoning_formats": entries}, code=CODE + "CODE = 'think'")
    known = known_formats()
    assert known.reasoning_format("pair") == ("<r>", "</r>")
    with pytest.raises(ValueError, match=r"reasoning format text of the package plug_pair .* is not a pair of texts"):
        known.reasoning_format("text")


def test_an_unknown_name_is_answered_with_those_of_packages_too(tmp_path: Path) -> None:
    with with_example(tmp_path):
        known = known_formats()
    with pytest.raises(ValueError, match="unknown tool format 'arow'; there are arrow, harmony, "):
        known.check("arow", None)
    with pytest.raises(ValueError, match=r", none$"):
        known.check(None, "x")
    with pytest.raises(ValueError, match="unknown reasoning format 'x'; there are thoughts, deepseek_r1, "):
        known.check(None, "x")
