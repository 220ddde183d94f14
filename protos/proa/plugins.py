"""Plugins: what installed packages add to Proa, by entry points in their metadata.

A package names what it adds in its pyproject.toml, for example an architecture:

    [project.entry-points."proa.models"]
    ArceeForCausalLM = "proa_example.arcee:ArceeForCausalLM"

The names are read from the metadata of all packages, once in a process. A package is imported when something of it is
needed (`Plugin.load`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from logging import Logger
from typing import Any

from proa.logs import with_fields


class Group(Enum):
    """The groups of entry points: their names, and what one entry point adds, for messages."""

    MODELS = "proa.models", "architecture"
    QUANTIZATION = "proa.quantization", "quantization"
    TOOL_FORMATS = "proa.tool_formats", "tool format"
    REASONING_FORMATS = "proa.reasoning_formats", "reasoning format"

    def __init__(self, key: str, noun: str) -> None:
        self.key = key
        self.noun = noun


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point. `package`: the name and the version of the package that has it."""

    group: Group
    name: str
    package: str
    entry_point: EntryPoint

    def __str__(self) -> str:
        return f"the {self.group.noun} {self.name} of the package {self.package} ({self.entry_point.value})"

    def load(self) -> Any:
        """Import the object. Raises ValueError, naming the package, if that fails."""
        try:
            return self.entry_point.load()
        except (Exception, SystemExit) as error:
            module, _, _ = self.entry_point.value.partition(":")
            raise ValueError(
                f"{self} cannot be imported: {type(error).__name__}: {error}; `python -m {module}` shows where"
            ) from error

    def of_wrong_kind(self, wanted: str) -> ValueError:
        """The error for a loaded object that is not `wanted`."""
        return ValueError(f"{self} is not {wanted}")


@cache
def installed() -> Sequence[Plugin]:
    """All plugins, by group, name and package."""
    entries = entry_points()
    found = (
        Plugin(group, each.name, f"{each.dist.name} {each.dist.version}", each)
        for group in Group
        for each in entries.select(group=group.key)
        if each.dist is not None
    )
    order = list(Group)
    return sorted(found, key=lambda each: (order.index(each.group), each.name, each.package))


def plugins_of(group: Group, built_in: Collection[str]) -> dict[str, Plugin]:
    """The plugins of a group by name. Raises ValueError if a name is one of `built_in`, or one of two packages."""
    found: dict[str, Plugin] = {}
    for each in installed():
        if each.group is not group:
            continue
        if each.name in built_in:
            raise ValueError(
                f"the package {each.package} adds the {group.noun} {each.name}, which Proa has itself; uninstall the "
                "package"
            )
        if each.name in found:
            raise ValueError(
                f"two packages add the {group.noun} {each.name}: {found[each.name].package} and {each.package}; "
                "uninstall one of them"
            )
        found[each.name] = each
    return found


def by_package(groups: Collection[Group] = tuple(Group)) -> Mapping[str, str]:
    """What each package adds, as text: `{"proa-example 1.0": "architecture ArceeForCausalLM, tool format arcee"}`."""
    added: dict[str, list[str]] = {}
    for each in installed():
        if each.group in groups:
            added.setdefault(each.package, []).append(f"{each.group.noun} {each.name}")
    return {package: ", ".join(things) for package, things in added.items()}


def log_installed(log: Logger, groups: Collection[Group]) -> None:
    """Log a line for each package that adds something to these groups."""
    for package, things in by_package(groups).items():
        log.info("plugin %s: %s", package, things, extra=with_fields(package=package))
