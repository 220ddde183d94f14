"""Plugins are found by the metadata of installed packages, and imported when they are needed."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proa.plugins import Group, by_package, log_installed, plugins_of
from support.plugins import on_path, write_package


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with on_path(tmp_path):
        yield tmp_path


def test_a_name_is_known_before_its_package_is_imported(folder: Path) -> None:
    write_package(folder, "plug_late", {"proa.models": {"AForCausalLM": "plug_late:A"}}, code="A = 1")
    plugin = plugins_of(Group.MODELS, built_in=())["AForCausalLM"]
    assert "plug_late" not in sys.modules
    assert plugin.load() == 1


def test_groups_of_other_programs_are_no_plugins(folder: Path) -> None:
    write_package(
        folder, "plug_other", {"vllm.general_plugins": {"a": "plug_other:a"}, "proa.models": {"A": "plug_other:A"}}
    )
    assert list(by_package()) == ["plug_other 1.0"]
    assert plugins_of(Group.QUANTIZATION, built_in=()) == {}


def test_a_name_of_two_packages_is_refused_with_both(folder: Path) -> None:
    for name, version in (("plug_one", "1.0"), ("plug_two", "2.1")):
        write_package(folder, name, {"proa.tool_formats": {"arrow": f"{name}:X"}}, version=version)
    with pytest.raises(
        ValueError, match=r"two packages add the tool format arrow: plug_one 1\.0 and plug_two 2\.1; uninstall one"
    ):
        plugins_of(Group.TOOL_FORMATS, built_in=())


def test_a_name_that_proa_has_is_refused_with_the_package(folder: Path) -> None:
    write_package(folder, "plug_llama", {"proa.models": {"LlamaForCausalLM": "plug_llama:X"}})
    with pytest.raises(ValueError, match=r"plug_llama 1\.0 adds the architecture LlamaForCausalLM, which Proa has"):
        plugins_of(Group.MODELS, built_in={"LlamaForCausalLM"})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemError('broken')", "SystemError: broken"),
        ("raise SystemExit('no device')", "SystemExit: no device"),
        ("", "AttributeError: module 'plug_broken' has no attribute 'X'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_with_the_reason(code: str, reason: str, tmp_path: Path) -> None:
    write_package(tmp_path, "plug_broken", {"proa.quantization": {"q": "plug_broken:X"}}, code=code or "Y = 1")
    with (
        on_path(tmp_path),
        pytest.raises(ValueError, match=r"the quantization q of the package plug_broken 1\.0") as raised,
    ):
        plugins_of(Group.QUANTIZATION, built_in=())["q"].load()
    sys.modules.pop("plug_broken", None)
    assert reason in str(raised.value)
    assert "`python -m plug_broken` shows where" in str(raised.value)


def test_an_entry_point_that_names_no_object_is_refused_with_its_text(folder: Path) -> None:
    write_package(folder, "plug_text", {"proa.tool_formats": {"arrow": "plug text"}})
    with pytest.raises(ValueError, match=r"arrow of the package plug_text 1\.0 \(plug text\) cannot be imported"):
        plugins_of(Group.TOOL_FORMATS, built_in=())["arrow"].load()


def test_each_package_is_logged_with_what_it_adds(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry_points = {"proa.models": {"A": "plug:A", "B": "plug:B"}, "proa.tool_formats": {"arrow": "plug:X"}}
    write_package(folder, "plug_logged", entry_points)
    with caplog.at_level(logging.INFO):
        log_installed(logging.getLogger("proa"), (Group.MODELS, Group.QUANTIZATION))
    assert caplog.messages == ["plugin plug_logged 1.0: architecture A, architecture B"]
    assert by_package() == {"plug_logged 1.0": "architecture A, architecture B, tool format arrow"}
