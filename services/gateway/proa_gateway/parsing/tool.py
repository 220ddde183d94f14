"""The tools of a request, as the parser and the grammar need them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """`parameters`: JSON schema of the arguments. `strict`: calls must match it, or the request is refused."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The tool that the model must call."""

    name: str


ToolChoice = Literal["auto", "required"] | NamedTool
