"""Messages: tools that are only offered, and blocks that only record what other servers did, never fail a request."""

import inspect
from collections.abc import AsyncIterator
from typing import Any, get_args

import anthropic.types as types
import anthropic.types.beta as beta_types
import pytest
from typing_extensions import get_type_hints

from proa_gateway.apis.messages.protocol import RecordType
from proa_gateway.serving.tools.offers import MAX_RECORD_BYTES
from proa_gateway.serving.tools.tool import MAX_TOOLS
from support.offers import Asked, Door, open_door

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
F: Any = {"name": "f", "input_schema": {"type": "object"}}
QUESTION: Any = {"role": "user", "content": "Who won?"}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with open_door() as door:
        yield door


async def ask(door: Door, *messages: Any, **fields: Any) -> Asked:
    return await door.ask(PATH, max_tokens=5, messages=list(messages) or [QUESTION], **fields)


async def refused(door: Door, **fields: Any) -> str:
    return (await door.post(PATH, max_tokens=5, **{"messages": [QUESTION], **fields})).error


def offered_types() -> set[str]:
    """The types of the tools of Anthropic's client, but for the client's own."""
    unions = (types.ToolUnionParam, beta_types.BetaToolUnionParam)
    named = [get_type_hints(tool)["type"] for union in unions for tool in get_args(union)]
    return {kind for hint in named for kind in get_args(hint) if isinstance(kind, str)}


async def test_tools_of_other_types_are_left_out_and_named(door: Door) -> None:
    plain = await ask(door, tools=[F])
    assert plain.ignored is None
    kinds = offered_types()
    assert kinds > {"web_search_20250305", "bash_20250124", "text_editor_20250728", "mcp_toolset"}
    for kind in sorted(kinds | {"unheard_of_20990101"}):
        asked = await ask(door, tools=[{"type": kind, "name": "offered", "max_uses": 5}, F])
        assert (asked.ignored, asked.prompt) == (f"tools.{kind}", plain.prompt), kind
    custom = await ask(door, tools=[F | {"type": "custom"}])
    assert (custom.ignored, custom.prompt) == (None, plain.prompt)
    alone = await ask(door, tools=[SEARCH], mcp_servers=[{"type": "url", "url": "https://example.com", "name": "s"}])
    assert alone.ignored == "mcp_servers, tools.web_search_20250305"
    assert alone.prompt == (await ask(door)).prompt


async def test_they_are_counted_and_streamed_like_all_others(door: Door) -> None:
    asked = await ask(door, tools=[SEARCH, F])
    counted = await door.ask(COUNT, messages=[QUESTION], tools=[SEARCH, F])
    streamed = await ask(door, tools=[SEARCH, F], stream=True)
    assert counted.response.json()["input_tokens"] == asked.response.json()["usage"]["input_tokens"]
    assert counted.ignored == asked.ignored == streamed.ignored == "tools.web_search_20250305"


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([SEARCH, F], {"type": "tool", "name": "web_search"}, "'web_search_20250305'"),
        ([SEARCH], {"type": "any"}, "'web_search_20250305'"),
        ([F], {"type": "tool", "name": "g"}, "'g', which is not in tools"),
    ],
)
async def test_a_demanded_tool_that_is_not_supported_is_an_error(
    door: Door, tools: Any, choice: Any, words: str
) -> None:
    assert words in await refused(door, tools=tools, tool_choice=choice)


async def test_a_call_can_be_demanded_of_the_tools_that_are_left(door: Door) -> None:
    await ask(door, tools=[SEARCH, F], tool_choice={"type": "any"})
    assert door.engine.requests[-1].sampling_params.HasField("grammar")
    own: Any = F | {"name": "web_search"}
    await ask(door, tools=[SEARCH, own], tool_choice={"type": "tool", "name": "web_search"})
    assert door.engine.requests[-1].sampling_params.HasField("grammar")


USE: Any = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "the cup"}}
USED = '[server_tool_use: {"name": "web_search", "input": {"query": "the cup"}}]'
FOUND: Any = {
    "type": "web_search_tool_result",
    "tool_use_id": "srvtoolu_1",
    "content": [{"type": "web_search_result", "title": "Köln", "url": "https://a", "encrypted_content": "AAAA"}],
    "cache_control": {"type": "ephemeral"},
}
RESULT = (
    '[web_search_tool_result: {"tool_use_id": "srvtoolu_1", "content": '
    '[{"type": "web_search_result", "title": "Köln", "url": "https://a"}]}]'
)
TEXT: Any = {"type": "text", "text": "Köln."}


async def test_what_server_tools_did_is_the_assistants_text(door: Door) -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    answer = {"role": "assistant", "content": [thought, USE, FOUND, TEXT, USE]}
    asked = await ask(door, QUESTION, answer, QUESTION)
    assert f"<|im_start|>assistant\n{USED}\n{RESULT}\nKöln.\n{USED}<|im_end|>" in asked.prompt
    counted = await door.ask(COUNT, messages=[QUESTION, answer, QUESTION])
    assert counted.response.json()["input_tokens"] == asked.response.json()["usage"]["input_tokens"]


async def test_every_record_of_anthropics_client_is_text(door: Door) -> None:
    for kind in get_args(RecordType):
        block = {"type": kind, "tool_use_id": "t", "content": {"type": "inner", "stdout": "1", "encrypted_stdout": "A"}}
        asked = await ask(door, QUESTION, {"role": "assistant", "content": [block]}, QUESTION)
        assert f'[{kind}: {{"tool_use_id": "t", "content": {{"type": "inner", "stdout": "1"}}}}]' in asked.prompt, kind
    blocks = (types.ContentBlockParam, beta_types.BetaContentBlockParam)
    params = [block for union in blocks for block in get_args(union) if inspect.isclass(block)]
    known = {kind for block in params for kind in get_args(get_type_hints(block)["type"])}
    assert {kind for kind in known if kind.endswith("_tool_result")} <= {*get_args(RecordType)}


async def test_a_reference_in_a_result_is_part_of_its_text(door: Door) -> None:
    reference = {"type": "tool_reference", "tool_name": "f"}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, reference]}
    asked = await ask(
        door, QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}, tools=[F]
    )
    assert '<tool_response>\nKöln.\n[tool_reference: {"tool_name": "f"}]\n</tool_response>' in asked.prompt


async def test_a_message_of_which_nothing_can_be_read_is_left_out(door: Door) -> None:
    empty = {"type": "web_search_tool_result", "id": "x", "encrypted_content": "AAAA", "content": None}
    plain = await ask(door, QUESTION, QUESTION)
    asked = await ask(door, QUESTION, {"role": "assistant", "content": [empty]}, QUESTION)
    assert asked.prompt == plain.prompt
    assert "all of them are empty" in await refused(door, messages=[{"role": "assistant", "content": [empty]}])


async def test_a_record_has_at_most_8_kib_of_text(door: Door) -> None:
    block = {"type": "mcp_tool_result", "content": "ö" * 20_000}
    asked = await ask(door, QUESTION, {"role": "assistant", "content": [block]}, QUESTION)
    record = asked.prompt.split("assistant\n")[1].split("<|im_end|>")[0]
    assert MAX_RECORD_BYTES - 3 <= len(record.encode()) <= MAX_RECORD_BYTES
    assert record.endswith("ö…]")


async def test_a_compaction_is_its_text_or_left_out_with_a_warning(door: Door) -> None:
    unreadable = {"type": "compaction", "content": None, "encrypted_content": "AAAA"}
    plain = await ask(door, QUESTION, {"role": "assistant", "content": [TEXT]}, QUESTION)
    messages = [QUESTION, {"role": "assistant", "content": [unreadable, TEXT]}, QUESTION]
    asked = await ask(door, *messages)
    counted = await door.ask(COUNT, messages=messages)
    assert asked.prompt == plain.prompt
    assert asked.warnings == counted.warnings == "a compaction by another server cannot be read"
    readable = {"type": "compaction", "content": "They talked about the cup. " * 500}
    asked = await ask(door, {"role": "assistant", "content": [readable]}, QUESTION)
    assert readable["content"] in asked.prompt
    assert asked.warnings is None


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "unheard_of"}, "has the type 'unheard_of'"),
        ({"type": "container_upload", "file_id": "f"}, "has the type 'container_upload'"),
        ({"type": "server_tool_use", "input": {"a": "\ud800"}}, "lone surrogate"),
        ({"type": "server_tool_use", "input": {"a": 2**70}}, "64 bits"),
    ],
)
async def test_unknown_blocks_and_what_is_not_json_are_refused(door: Door, block: Any, words: str) -> None:
    assert words in await refused(door, messages=[QUESTION, {"role": "assistant", "content": [block]}])


async def test_there_may_be_1024_tools_with_those_left_out(door: Door) -> None:
    offered = [SEARCH] * (MAX_TOOLS - 1)
    assert (await ask(door, tools=[*offered, F])).ignored == "tools.web_search_20250305"
    assert "at most 1024" in await refused(door, tools=[*offered, F, SEARCH])
