"""Run a program as a machine would that has only some of the packages installed here; the others cannot be imported.

    python -m support.only_packages "LIST.txt -MODULE …" PROGRAM ARGUMENTS

A list has requirements, `name` or `name==version`, several in a line; a line `-r OTHER.txt` includes another list. Only
names matter: versions are those installed here. `-MODULE` hides a module that the machine's older version lacks.
"""

import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, distributions
from pathlib import Path
from types import ModuleType
from typing import Any

_OURS = ("proa-protos", "proa-engine", "proa-gateway")


def read_list(path: Path) -> dict[str, str]:
    """Versions by name in lower case with hyphens; an empty one if the list has none."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        line = line.partition("#")[0]
        if line.startswith("-r "):
            found |= read_list(path.parent / line.removeprefix("-r ").strip())
            continue
        for requirement in line.split():
            name, _, version = requirement.partition("==")
            found[_canonical(name)] = version
    return found


class OnlyPackages(MetaPathFinder):
    """Finds what `finders` find, but for some modules and for the distributions that are not allowed."""

    def __init__(self, allowed: Iterable[str], modules: Iterable[str], finders: Sequence[Any]) -> None:
        self._names = {*allowed, *_OURS}
        self._finders = finders
        visible: set[str] = set()
        hidden: set[str] = set()
        for distribution in distributions():
            (visible if self._allows(distribution) else hidden).update(_modules(distribution))
        self._hidden = hidden - visible | {*modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._hidden:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in self._finders)
        return next((spec for spec in found if spec is not None), None)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        for finder in self._finders:
            if hasattr(finder, "find_distributions"):
                yield from filter(self._allows, finder.find_distributions(context))

    def invalidate_caches(self) -> None:
        for finder in self._finders:
            if hasattr(finder, "invalidate_caches"):
                finder.invalidate_caches()

    def _allows(self, distribution: Distribution) -> bool:
        return _canonical(distribution.name) in self._names


def _modules(distribution: Distribution) -> Iterator[str]:
    """Its modules and the packages that contain them, two levels deep."""
    for file in distribution.files or ():
        if file.suffix in (".py", ".so") and ".." not in file.parts:
            parts = [*file.parts[:-1], *([] if file.name == "__init__.py" else [file.name.partition(".")[0]])]
            yield from (".".join(parts[:depth]) for depth in (1, 2) if depth <= len(parts))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(lists: str, program: str, *arguments: str) -> None:
    allowed = [name for each in lists.split() if not each.startswith("-") for name in read_list(Path(each))]
    modules = [each.removeprefix("-") for each in lists.split() if each.startswith("-")]
    sys.meta_path[:] = [OnlyPackages(allowed, modules, [*sys.meta_path])]
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
