"""The architecture page names files and functions that exist, all packages, and the import rules that are checked."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
STOPS = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)
PACKAGES = {"Gateway": ROOT / "services/gateway/proa_gateway", "Engine": ROOT / "engine/proa_engine"}
LAYERS = {
    "gateway": "proa_gateway",
    "engine": "proa_engine",
    **{name: f"proa_engine.{name}" for name in ("worker", "step", "ranks", "memory", "models", "kernels", "core")},
    "kv": "proa_engine.core.kv",
}


def test_the_page_has_a_stop_for_each_step() -> None:
    assert len(STOPS) > 20


@pytest.mark.parametrize(("file", "function"), STOPS)
def test_each_stop_exists(file: str, function: str) -> None:
    text = (ROOT / file).read_text()
    *owner, name = function.split(".")
    assert re.search(rf"^ *(async )?def {name}\b", text, re.MULTILINE), f"{file} has no function {name}"
    assert not owner or f"class {owner[0]}" in text, f"{file} has no class {owner[0]}"


@pytest.mark.parametrize("side", PACKAGES)
def test_the_table_names_every_package_and_module(side: str) -> None:
    table = PAGE.partition(f"\n{side} (`")[2].partition("|---|---|")[2].partition("\n\n")[0]
    named = re.findall(r"`([^`]+)`", "".join(line.split("|")[1] for line in table.split("\n") if line))
    found = [*PACKAGES[side].glob("*.py"), *(path.parent for path in PACKAGES[side].glob("*/__init__.py"))]
    there = {f"{path.name}/" if path.is_dir() else path.name for path in found} - {"__init__.py", "__main__.py"}
    assert (sorted(there - set(named)), sorted(set(named) - there)) == ([], []), "missing, and gone"


@pytest.mark.parametrize("name", LAYERS)
def test_the_arrows_are_those_that_are_checked(name: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [each["layers"] for each in contracts if each.get("containers") == [LAYERS[name]]]
    [drawn] = re.findall(rf"^{name} +(.+(?:\n +→.+)*)", PAGE, re.MULTILINE)
    assert [" ".join(layer.split()) for layer in drawn.split("→")] == layers


def test_the_page_names_every_file_that_imports_by_name() -> None:
    sources = [path for folder in ("engine", "services", "protos") for path in (ROOT / folder).rglob("*.py")]
    files = {str(path.relative_to(ROOT)) for path in sources if "import_module(" in path.read_text()}
    table = PAGE.partition("| imports by name |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)) == files
