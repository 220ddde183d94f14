"""Tools as the chat template renders them: definitions in JSON, calls, results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CALL, CALL_END, RESPONSE, RESPONSE_END = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"

Argument = str | int | float


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: JSON schema of each parameter by name."""

    name: str
    description: str | None
    parameters: Mapping[str, Mapping[str, object]]
    required: tuple[str, ...]

    @property
    def function(self) -> dict[str, object]:
        """The `function` of a tool in the OpenAI API."""
        schema = {"type": "object", "properties": dict(self.parameters), "required": list(self.required)}
        described = {} if self.description is None else {"description": self.description}
        return {"name": self.name, **described, "parameters": schema}

    @property
    def definition(self) -> dict[str, object]:
        """The tool in the OpenAI API."""
        return {"type": "function", "function": self.function}

    @property
    def json(self) -> str:
        return json.dumps(self.function, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Argument]

    @property
    def function(self) -> dict[str, object]:
        """The `function` of a tool call in the OpenAI API, with arguments as an object."""
        return {"name": self.name, "arguments": dict(self.arguments)}

    @property
    def json(self) -> str:
        return json.dumps(self.function, ensure_ascii=False)


def tools_text(tools: Sequence[Tool]) -> str:
    """The part of the system message that lists the tools, empty without tools."""
    return "\n".join(("<tools>", *(tool.json for tool in tools), "</tools>")) if tools else ""


def calls_text(calls: Sequence[Call]) -> str:
    return "\n".join(f"{CALL}\n{call.json}\n{CALL_END}" for call in calls)


def results_text(results: Sequence[str]) -> str:
    return "\n".join(f"{RESPONSE}\n{result}\n{RESPONSE_END}" for result in results)
