"""docs/plugins.md: the public names exist where it says, and the example uses no others."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

from proa.plugins import Group
from proa_engine.models.registry import MODULES
from support.plugins import EXAMPLE

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
PUBLIC = {
    module: set(re.findall(r"`(\w+)`", names))
    for module, names in re.findall(r"^\| `(proa_[\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
}


def imported(source: str) -> Iterator[tuple[str, str]]:
    """Modules of Proa that a file imports from, and the names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("proa_"):
            yield from ((f"{node.module}", alias.name) for alias in node.names)
        assert not (isinstance(node, ast.Import) and any(alias.name.startswith("proa_") for alias in node.names))


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_where_the_page_says(module: str) -> None:
    found = vars(import_module(module))
    assert PUBLIC[module] <= found.keys()
    for each in (found[name] for name in PUBLIC[module]):
        assert not isinstance(each, type | FunctionType) or each.__module__ == module


def test_the_example_imports_public_names_only() -> None:
    sources = sorted((EXAMPLE / "proa_example").glob("*.py"))
    used = {each for source in sources for each in imported(source.read_text())}
    modules = {(parent, child) for parent, _, child in (each.rpartition(".") for each in PUBLIC)}
    assert used
    assert {each for each in used if each[1] not in PUBLIC.get(each[0], ())} <= modules


def test_every_group_is_on_the_page_and_in_the_example() -> None:
    entry_points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    groups = {group.key for group in Group}
    assert set(re.findall(r"^\| `(proa\.\w+)` \|", PAGE, re.MULTILINE)) == groups
    assert entry_points.keys() == groups
    assert not entry_points["proa.models"].keys() & MODULES.keys()
