"""Tools of the Responses API. Its functions have no object of their own within a tool, and may stand in namespaces."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.openai.fields import TemplateValue, Text, known_types
from proa_gateway.openai.tools import MAX_NAME, Tool, ToolName


@dataclass(frozen=True, slots=True)
class CallName:
    """The name of a function that may be called. `flat`: the one that the model gets to know, as in vLLM."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"

    def fields(self) -> dict[str, str]:
        """Of a call."""
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `tool`: in the form of chat completions."""

    call_name: CallName
    tool: Tool


class FunctionParam(BaseModel):
    """`strict`: calls must match the schema of the parameters."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: dict[Text, TemplateValue] | None = None
    strict: bool | None = None

    def function(self, namespace: str | None = None) -> Function:
        call_name = CallName(self.name, namespace)
        fields = self.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
        function = {"name": call_name.flat, **fields}
        return Function(call_name, Tool.model_validate({"type": "function", "function": function}))


class NamespaceParam(BaseModel):
    """Functions with a common first name. `description` has no effect: each function has its own."""

    model_config = ConfigDict(extra="allow")

    type: Literal["namespace"]
    name: ToolName
    description: Text | None = None
    tools: list[Annotated[FunctionParam, known_types("function")]]

    @model_validator(mode="after")
    def _check_names(self) -> "NamespaceParam":
        if any(len(CallName(tool.name, self.name).flat) > MAX_NAME for tool in self.tools):
            message = "has a function whose name, with that of the namespace, is longer than {most} characters"
            raise PydanticCustomError("invalid_value", message, {"most": MAX_NAME})
        return self


ToolParam = Annotated[
    Annotated[FunctionParam | NamespaceParam, Field(discriminator="type")], known_types("function", "namespace")
]


def functions_of(tools: Iterable[FunctionParam | NamespaceParam]) -> Iterator[Function]:
    for tool in tools:
        if isinstance(tool, FunctionParam):
            yield tool.function()
        else:
            yield from (function.function(tool.name) for function in tool.tools)
