"""All formats that a gateway knows: those of `formats.py`, and those of installed packages (`proa.plugins`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from proa.plugins import Group, Plugin, plugins_of
from proa_gateway.parsing.compiled_format import compile_format
from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.formats import FORMATS

Reasoning = tuple[str, str]
"""What opens and what closes reasoning."""
NO_REASONING: Final = "none"
"""The name of `--reasoning-parser` with which outputs have no reasoning."""
_THINK = ("<think>", "</think>")
_REASONING = {
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    **{each.name: each.reasoning for each in FORMATS if each.reasoning is not None},
}


@dataclass(frozen=True, slots=True)
class KnownFormats:
    """`tools`: in the order in which their signs are looked for in a chat template. `reasoning`: by the name of
    `--reasoning-parser`. `failures`: why formats of packages cannot be used, by what they are and their names."""

    tools: Sequence[ToolFormat]
    reasoning: Mapping[str, Reasoning]
    failures: Mapping[tuple[Group, str], str] = field(default_factory=dict)

    def check(self, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
        """Raises `ValueError` if one of these names is not that of a format."""
        if tool_call_parser is not None:
            self.tool_format(tool_call_parser)
        if reasoning_parser is not None:
            self.reasoning_format(reasoning_parser)

    def tool_format(self, name: str) -> ToolFormat:
        """Raises `ValueError` for an unknown name, and for a format that cannot be used."""
        self._check(Group.TOOL_FORMATS, name)
        for each in self.tools:
            if each.name == name:
                return each
        raise ValueError(f"unknown tool format {name!r}; there are {', '.join(each.name for each in self.tools)}")

    def reasoning_format(self, name: str) -> Reasoning | None:
        """None for `NO_REASONING`. Raises `ValueError` as `tool_format`."""
        if name == NO_REASONING:
            return None
        if name not in self.reasoning:
            self._check(Group.REASONING_FORMATS, name)
            self._check(Group.TOOL_FORMATS, name)
            names = ", ".join([*self.reasoning, NO_REASONING])
            raise ValueError(f"unknown reasoning format {name!r}; there are {names}")
        return self.reasoning[name]

    def _check(self, group: Group, name: str) -> None:
        if (failure := self.failures.get((group, name))) is not None:
            raise ValueError(failure)


BUILT_IN = KnownFormats(FORMATS, _REASONING)


def known_formats() -> KnownFormats:
    """Import the formats of installed packages. Their signs are looked for before those of `formats.py`, which may also
    stand in the chat templates of other models. Raises `ValueError` if two formats have one name."""
    tools: list[ToolFormat] = []
    reasoning: dict[str, Reasoning] = {}
    failures: dict[tuple[Group, str], str] = {}
    for plugin in plugins_of(Group.TOOL_FORMATS, {each.name for each in FORMATS}).values():
        try:
            tools.append(_tool_format(plugin))
        except ValueError as error:
            failures[plugin.group, plugin.name] = str(error)
    reasoning |= {each.name: each.reasoning for each in tools if each.reasoning is not None}
    for plugin in plugins_of(Group.REASONING_FORMATS, {*_REASONING, *reasoning, NO_REASONING}).values():
        try:
            reasoning[plugin.name] = _reasoning_format(plugin)
        except ValueError as error:
            failures[plugin.group, plugin.name] = str(error)
    return KnownFormats((*tools, *FORMATS), reasoning | _REASONING, failures)


def _tool_format(plugin: Plugin) -> ToolFormat:
    loaded = plugin.load()
    if not isinstance(loaded, ToolFormat):
        raise plugin.of_wrong_kind(f"a {ToolFormat.__module__}.ToolFormat")
    try:
        compile_format(loaded, {}, calls=True)
    except Exception as error:
        raise plugin.of_wrong_kind(f"a valid ToolFormat: {type(error).__name__}: {error}") from error
    return replace(loaded, name=plugin.name)


def _reasoning_format(plugin: Plugin) -> Reasoning:
    match plugin.load():
        case (str(opening), str(closing)) if opening and closing:
            return opening, closing
    raise plugin.of_wrong_kind("a pair of texts, what opens and what closes reasoning")
