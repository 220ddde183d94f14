"""Tools for chat templates that do not use them: a description in the text of the first message.

    You can call these functions:
    {"name": "get_weather", "description": "…", "parameters": {…}}
    To call one, write nothing but its call:
    <tool_call>
    {"name": "NAME", "arguments": {…}}
    </tool_call>

The form of calls stands there if the model's own is not known; it is that of Hermes, which many models have seen.
"""

import json
from collections.abc import Sequence
from typing import Final

from proa.fit_messages import with_blank_line
from proa.template_rules import Message, role_of
from proa_gateway.parsing.json_formats import HERMES
from proa_gateway.serving.tools.tool import Tool

DESCRIBED: Final = "tools: the model's chat template does not use them, so they were described in the first message"
UNKNOWN: Final = f"tools: the model's format of calls is not known, so only that of {HERMES.name} is read"


def describe_tools(messages: Sequence[Message], tools: Sequence[Tool], *, shows_form: bool) -> list[Message]:
    """Return the messages with a description of the tools: after the text of a system message at the start, or else
    before that of the user's first message. `shows_form`: it shows how calls are written."""
    lines = ["You can call these functions:"]
    lines += [json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools]
    if shows_form:
        lines += ["To call one, write nothing but its call:", hermes_call("NAME", "{…}")]
    text = "\n".join(lines)
    first = messages[0]
    if role_of(first) == "system":
        return [{**first, "content": with_blank_line(first.get("content"), text)}, *messages[1:]]
    index = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        return [{"role": "system", "content": text}, *messages]
    user = messages[index]
    described = {**user, "content": with_blank_line(text, user.get("content"))}
    return [*messages[:index], described, *messages[index + 1 :]]


def hermes_call(name: str, arguments: str) -> str:
    """A call as text. `arguments`: JSON."""
    return HERMES.call.replace("$name", name).replace("$arguments", arguments)
