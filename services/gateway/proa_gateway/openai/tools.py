"""Tools: the functions that a model may call, and which of them a request allows."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from proa_gateway.openai.fields import TemplateValue, Text

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(BaseModel):
    """`parameters`: JSON schema of the arguments, an object; None: no arguments. `strict`: calls must match it."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TemplateValue]

    name: ToolName
    description: Text | None = None
    parameters: dict[str, TemplateValue] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A function in the form of chat completions. Other APIs' tools are converted to it."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TemplateValue]

    type: Literal["function"]
    function: FunctionDefinition
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_sent(cls, value: Any, handler: ModelWrapValidatorHandler["Tool"]) -> "Tool":
        tool = handler(value)
        if isinstance(value, dict):
            tool._sent = value
        return tool

    def for_template(self) -> dict[str, Any]:
        """As it was sent, its order of keys included, but without `strict`, which is for the gateway."""
        function = {key: value for key, value in self._sent["function"].items() if key != "strict"}
        return {**self._sent, "function": function}


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The tool that the model must call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool
