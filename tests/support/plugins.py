"""Packages with entry points, as an installer leaves them in a folder of `sys.path`."""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from proa import plugins

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"

EntryPoints = Mapping[str, Mapping[str, str]]  # group -> name -> object


def write_package(folder: Path, name: str, entry_points: EntryPoints, *, version: str = "1.0", code: str = "") -> None:
    """Write the metadata of a package, and `code` as its only module."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sections = ("\n".join([f"[{group}]", *map(" = ".join, each.items())]) for group, each in entry_points.items())
    (metadata / "entry_points.txt").write_text("\n\n".join(sections))
    if code:
        (folder / f"{name}.py").write_text(code)


@contextmanager
def on_path(*folders: Path) -> Iterator[None]:
    """Make what is installed in these folders known to this process."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        plugins.installed.cache_clear()
        try:
            yield
        finally:
            plugins.installed.cache_clear()


@contextmanager
def with_example(folder: Path) -> Iterator[None]:
    """Make the package of examples/plugin known to this process. `folder`: for its metadata."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    write_package(folder, project["name"], project["entry-points"], version=project["version"])
    with on_path(folder, EXAMPLE):
        yield
