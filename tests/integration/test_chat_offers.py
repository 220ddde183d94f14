"""Chat completions, batches of them and `/tokenize`: tools of types that nobody runs here never fail a request."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from proa_gateway.serving.tools.tool import MAX_TOOLS
from support.offers import Door, open_door

PATH = "/v1/chat/completions"
F: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGES: Any = [{"role": "user", "content": "Who won?"}]


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with open_door() as door:
        yield door


async def test_tools_of_other_types_are_left_out_and_named(door: Door) -> None:
    plain = await door.ask(PATH, messages=MESSAGES, tools=[F])
    for kind in ("web_search", "web_search_20250305", "mcp", "code_interpreter", "unheard_of"):
        tool = {"type": kind, "function": {"name": "f"}, "server_label": "x"}
        asked = await door.ask(PATH, messages=MESSAGES, tools=[tool, F, tool])
        assert (asked.ignored, asked.prompt) == (f"tools.{kind}", plain.prompt), kind
    alone = await door.ask(PATH, messages=MESSAGES, tools=[{"type": "mcp"}, {"type": "web_search"}])
    assert alone.ignored == "tools.mcp, tools.web_search"
    assert alone.prompt == (await door.ask(PATH, messages=MESSAGES)).prompt


async def test_in_batches_and_when_tokens_are_counted(door: Door) -> None:
    tools = [{"type": "web_search"}, F]
    asked = await door.ask(PATH, messages=MESSAGES, tools=tools)
    counted = await door.ask("/tokenize", messages=MESSAGES, tools=tools)
    batch = await door.ask(f"{PATH}/batch", messages=[MESSAGES, MESSAGES], tools=tools)
    streamed = await door.ask(PATH, messages=MESSAGES, tools=tools, stream=True)
    assert asked.ignored == counted.ignored == batch.ignored == streamed.ignored == "tools.web_search"
    assert counted.response.json()["count"] == asked.response.json()["usage"]["prompt_tokens"]
    assert asked.prompt == batch.prompt == streamed.prompt


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([F, {"type": "web_search"}], {"type": "web_search"}, "'web_search'"),
        ([{"type": "web_search"}, {"type": "mcp"}], "required", "'web_search', 'mcp'"),
        ([F], allowed("required", {"type": "mcp"}), "'mcp'"),
        (
            [F, {"type": "shell", "name": "g"}],
            {"type": "function", "function": {"name": "g"}},
            "'g', whose type 'shell'",
        ),
        ([F], {"type": "function", "function": {"name": "g"}}, "'g', which is not in tools"),
        ([F], allowed("auto", {"type": ""}), "must have"),
    ],
)
async def test_a_demanded_tool_that_is_not_supported_is_an_error(
    door: Door, tools: Any, choice: Any, words: str
) -> None:
    for path in (PATH, "/tokenize"):
        asked = await door.post(path, messages=MESSAGES, tools=tools, tool_choice=choice)
        assert words in asked.error
        assert asked.response.json()["error"]["param"] == "tool_choice"


async def test_allowed_tools_of_other_types_are_left_out(door: Door) -> None:
    choice = allowed("required", {"type": "web_search"}, {"type": "function", "function": {"name": "f"}})
    asked = await door.ask(PATH, messages=MESSAGES, tools=[F, {"type": "web_search"}], tool_choice=choice)
    assert '"name": "f"' in asked.prompt
    assert door.engine.requests[-1].sampling_params.HasField("grammar")


async def test_a_tool_without_a_type_is_refused(door: Door) -> None:
    for tool in ({"function": {"name": "f"}}, {"type": 5}, {"type": ""}, "web_search", {"type": "\ud800"}):
        asked = await door.post(PATH, messages=MESSAGES, tools=[tool])
        assert "tools[0]" in asked.error


async def test_an_error_in_a_tool_names_its_place(door: Door) -> None:
    asked = await door.post(PATH, messages=MESSAGES, tools=[{"type": "mcp"}, {"type": "function", "function": {}}])
    assert asked.response.json()["error"]["param"] == "tools[1].function.name"


async def test_there_may_be_1024_tools_with_those_left_out(door: Door) -> None:
    offered = [{"type": "web_search"}] * (MAX_TOOLS - 1)
    assert (await door.ask(PATH, messages=MESSAGES, tools=[*offered, F])).ignored == "tools.web_search"
    asked = await door.post(PATH, messages=MESSAGES, tools=[*offered, F, {"type": "mcp"}])
    assert "at most 1024" in asked.error
