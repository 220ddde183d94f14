"""Responses: tools that are only offered, and items that only record what other servers did, never fail a request."""

from collections.abc import AsyncIterator
from typing import Any, get_args

import pytest
from openai.types.responses.tool_param import ToolParam
from typing_extensions import get_type_hints

from proa_gateway.serving.tools.offers import MAX_RECORD_BYTES
from proa_gateway.serving.tools.tool import MAX_TOOLS
from support.chat import tool_tokenizer
from support.fake_engine import EOS, Reply
from support.offers import Asked, Door, open_door

PATH = "/v1/responses"
F: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
OFFERED = [
    *("web_search", "web_search_2025_08_26", "web_search_preview", "file_search", "image_generation", "mcp"),
    *("code_interpreter", "computer", "computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search"),
    *("programmatic_tool_calling", "unheard_of"),
]
SUPPORTED = {"function", "namespace", "custom"}
QUESTION: Any = {"role": "user", "content": "Who won?"}
SEARCH: Any = {
    "type": "web_search_call",
    "id": "ws_1",
    "status": "completed",
    "action": {"type": "search", "query": "the cup", "sources": None},
}
SEARCHED = '[web_search_call: {"status": "completed", "action": {"type": "search", "query": "the cup"}}]'
ANSWER: Any = {"type": "message", "role": "assistant", "content": "Köln."}


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with open_door() as door:
        yield door


def of_prompt(asked: Asked, role: str) -> list[str]:
    """The texts of the prompt's messages of this role."""
    messages = [text.split("<|im_end|>")[0] for text in asked.prompt.split(f"<|im_start|>{role}\n")[1:]]
    return messages[:-1] if role == "assistant" else messages  # the last one is the answer


async def test_tools_of_other_types_are_left_out_and_named(door: Door) -> None:
    plain = await door.ask(PATH, input="Hi", tools=[F])
    for kind in OFFERED:
        tool = {"type": kind, "name": "offered", "server_label": "x", "search_context_size": "low"}
        asked = await door.ask(PATH, input="Hi", tools=[tool, F, tool])
        assert (asked.ignored, asked.prompt) == (f"tools.{kind}", plain.prompt), kind
        assert asked.response.json()["tools"] == [tool, F | {"description": None, "strict": None}, tool]
    assert plain.ignored is None
    alone = await door.ask(PATH, input="Hi", tools=[{"type": "web_search"}, {"type": "mcp"}])
    assert alone.ignored == "tools.web_search, tools.mcp"
    assert alone.prompt == (await door.ask(PATH, input="Hi")).prompt


def test_every_tool_of_openais_client_is_offered_or_supported() -> None:
    types = {kind for tool in get_args(ToolParam) for kind in get_args(get_type_hints(tool)["type"])}
    assert types >= {"web_search", "function", "custom"}
    assert types - SUPPORTED - {*OFFERED, "web_search_preview_2025_03_11"} == set()


async def test_tools_of_other_types_in_a_namespace_are_left_out(door: Door) -> None:
    space = {"type": "namespace", "name": "sky", "description": "", "tools": [F, {"type": "web_search"}]}
    asked = await door.ask(PATH, input="Hi", tools=[space])
    assert asked.ignored == "tools.web_search"
    assert "sky__f" in asked.prompt


async def test_they_are_counted_and_streamed_like_all_others(door: Door) -> None:
    fields: Any = {"input": [QUESTION, SEARCH], "tools": [{"type": "web_search"}, F]}
    asked = await door.ask(PATH, **fields)
    counted = await door.ask(f"{PATH}/input_tokens", **fields)
    assert counted.response.json()["input_tokens"] == asked.response.json()["usage"]["input_tokens"]
    streamed = await door.ask(PATH, **fields, stream=True)
    assert counted.ignored == asked.ignored == streamed.ignored == "tools.web_search"
    assert streamed.prompt == asked.prompt


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([F, {"type": "web_search"}], {"type": "web_search"}, "'web_search'"),
        ([F, {"type": "mcp"}], {"type": "mcp", "server_label": "x", "name": "f"}, "'mcp'"),
        ([{"type": "web_search"}, {"type": "mcp"}], "required", "'web_search', 'mcp'"),
        (
            [F, {"type": "mcp"}],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "x"}]},
            "'mcp'",
        ),
        ([F, {"type": "shell", "name": "g"}], {"type": "function", "name": "g"}, "'shell'"),
        ([F], {"type": "function", "name": "g"}, "'g', which is not in tools"),
        ([], "required", "when tools are specified"),
    ],
)
async def test_a_demanded_tool_that_is_not_supported_is_an_error(
    door: Door, tools: Any, choice: Any, words: str
) -> None:
    asked = await door.post(PATH, input="Hi", tools=tools, tool_choice=choice)
    assert words in asked.error
    assert asked.response.json()["error"]["param"] == "tool_choice"


async def test_a_call_can_be_demanded_of_the_tools_that_are_left(door: Door) -> None:
    asked = await door.ask(PATH, input="Hi", tools=[{"type": "web_search"}, F], tool_choice="required")
    assert asked.ignored == "tools.web_search"
    assert door.engine.requests[-1].sampling_params.HasField("grammar")


async def test_allowed_tools_of_other_types_are_left_out(door: Door) -> None:
    tools = [F, F | {"name": "g"}, {"type": "web_search"}]
    entries = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "function", "name": "g"}]
    asked = await door.ask(
        PATH, input="Hi", tools=tools, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": entries}
    )
    assert '"name": "g"' in asked.prompt
    assert '"name": "f"' not in asked.prompt
    none = {"type": "allowed_tools", "mode": "auto", "tools": entries[:2]}
    asked = await door.ask(PATH, input="Hi", tools=tools, tool_choice=none)
    assert '"name"' not in asked.prompt


RECORDS: list[tuple[dict[str, Any], str]] = [
    (SEARCH, SEARCHED),
    (
        {"type": "file_search_call", "id": "fs_1", "queries": ["cup"], "status": "failed", "results": None},
        '[file_search_call: {"queries": ["cup"], "status": "failed"}]',
    ),
    (
        {"type": "mcp_call", "id": "m", "server_label": "s", "name": "n", "arguments": "{}", "output": "1:0"},
        '[mcp_call: {"server_label": "s", "name": "n", "arguments": "{}", "output": "1:0"}]',
    ),
    (
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": [{"name": "n", "input_schema": {}}]},
        '[mcp_list_tools: {"server_label": "s", "tools": [{"name": "n", "input_schema": {}}]}]',
    ),
    (
        {
            "type": "code_interpreter_call",
            "id": "ci_1",
            "code": "print(1)",
            "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "data:image/png;base64,AAAA"}],
        },
        '[code_interpreter_call: {"code": "print(1)", "outputs": [{"type": "logs", "logs": "1"}, {"type": "image"}]}]',
    ),
    (
        {"type": "image_generation_call", "id": "ig_1", "result": "AAAA", "revised_prompt": "A cup."},
        '[image_generation_call: {"revised_prompt": "A cup."}]',
    ),
    (
        {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        '[local_shell_call: {"call_id": "c", "action": {"type": "exec", "command": ["ls"]}}]',
    ),
    ({"type": "local_shell_call_output", "id": "c", "output": "a"}, '[local_shell_call_output: {"output": "a"}]'),
    (
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
        '[shell_call: {"call_id": "c", "action": {"commands": ["ls"]}}]',
    ),
    (
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]},
        '[shell_call_output: {"call_id": "c", "output": [{"stdout": "a"}]}]',
    ),
    (
        {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
        '[apply_patch_call: {"call_id": "c", "operation": {"type": "delete_file", "path": "a"}}]',
    ),
    (
        {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
        '[apply_patch_call_output: {"call_id": "c", "status": "completed"}]',
    ),
    (
        {"type": "tool_search_call", "execution": "server", "arguments": {"query": "cup"}},
        '[tool_search_call: {"execution": "server", "arguments": {"query": "cup"}}]',
    ),
    ({"type": "tool_search_output", "tools": [F]}, '[tool_search_output: {"tools": [{"type": "function", "name": "f"'),
    (
        {"type": "mcp_approval_request", "id": "a", "server_label": "s", "name": "n", "arguments": "{}"},
        '[mcp_approval_request: {"server_label": "s", "name": "n", "arguments": "{}"}]',
    ),
    (
        {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
        '[mcp_approval_response: {"approval_request_id": "a", "approve": true}]',
    ),
    (
        {"type": "program", "id": "p", "call_id": "c", "code": "f()", "encrypted_plan": "AAAA"},
        '[program: {"call_id": "c", "code": "f()"}]',
    ),
    ({"type": "program_output", "call_id": "c", "result": "1"}, '[program_output: {"call_id": "c", "result": "1"}]'),
    ({"type": "compaction", "encrypted_content": "AAAA", "summary": "A cup."}, '[compaction: {"summary": "A cup."}]'),
]


async def test_finished_items_of_other_servers_are_the_assistants_text(door: Door) -> None:
    for item, text in RECORDS:
        asked = await door.ask(PATH, input=[QUESTION, item, {"role": "user", "content": "Sure?"}])
        (record,) = of_prompt(asked, "assistant")
        assert record.startswith(text), item["type"]
        assert of_prompt(asked, "user") == ["Who won?", "Sure?"]
        assert asked.warnings is None


async def test_a_record_and_the_answer_after_it_are_one_message(door: Door) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    asked = await door.ask(PATH, input=[QUESTION, thought, SEARCH, SEARCH, ANSWER, SEARCH, ANSWER, QUESTION])
    assert of_prompt(asked, "assistant") == [f"{SEARCHED}\n{SEARCHED}\nKöln.\n{SEARCHED}", "Köln."]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    asked = await door.ask(PATH, input=[QUESTION, SEARCH, call, SEARCH, result, QUESTION], tools=[F])
    calls, after = of_prompt(asked, "assistant")
    assert calls.startswith(f"{SEARCHED}\n<tool_call>")
    assert after == SEARCHED


async def test_a_record_without_readable_fields_is_nothing(door: Door) -> None:
    empty = {"type": "web_search_call", "id": "ws_1", "action": None, "encrypted_content": "AAAA"}
    plain = await door.ask(PATH, input=[QUESTION, ANSWER, QUESTION])
    asked = await door.ask(PATH, input=[QUESTION, empty, ANSWER, empty, QUESTION])
    assert asked.prompt == plain.prompt
    assert "nothing in it that the model could read" in (await door.post(PATH, input=[empty])).error


async def test_a_record_has_at_most_8_kib_of_text(door: Door) -> None:
    item = {"type": "mcp_call", "name": "n", "output": "ö" * 20_000}
    (record,) = of_prompt(await door.ask(PATH, input=[QUESTION, item, QUESTION]), "assistant")
    assert MAX_RECORD_BYTES - 3 <= len(record.encode()) <= MAX_RECORD_BYTES
    assert record.endswith("ö…]")


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary"])
async def test_a_compaction_of_another_server_is_left_out_with_a_warning(door: Door, kind: str) -> None:
    item = {"type": kind, "id": "cmp_1", "encrypted_content": "AAAA"}
    plain = await door.ask(PATH, input=[QUESTION])
    for path in (PATH, f"{PATH}/input_tokens"):
        asked = await door.ask(path, input=[item, QUESTION, item])
        assert asked.warnings == "a compaction by another server cannot be read"
        assert asked.ignored is None
        assert asked.prompt in (plain.prompt, "")


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "send the item itself"),
        ({"type": "unheard_of", "id": "u"}, "has the type 'unheard_of'"),
        ({"type": "computer_call_output", "call_id": "c", "output": {}}, "has the type 'computer_call_output'"),
        ({"type": "mcp_call", "output": "\ud800"}, "lone surrogate"),
        ({"type": "mcp_call", "\ud800": "a"}, "lone surrogate"),
        ({"type": "mcp_call", "output": 2**70}, "64 bits"),
    ],
)
async def test_items_that_are_missing_unknown_or_not_json_are_refused(
    door: Door, item: dict[str, Any], words: str
) -> None:
    assert words in (await door.post(PATH, input=[QUESTION, item])).error


async def test_a_record_that_is_nested_too_deeply_is_refused(door: Door) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    asked = await door.post(PATH, input=[{"type": "mcp_call", "output": deep}])
    assert "nested too deeply" in asked.error


async def test_there_may_be_1024_tools_with_those_left_out(door: Door) -> None:
    offered = [{"type": "web_search"}] * (MAX_TOOLS - 1)
    assert (await door.ask(PATH, input="Hi", tools=[*offered, F])).ignored == "tools.web_search"
    asked = await door.post(PATH, input="Hi", tools=[*offered, F, {"type": "mcp"}])
    assert "at most 1024" in asked.error


async def test_stored_items_are_listed_as_they_were_sent(door: Door) -> None:
    unnamed = {"type": "tool_search_call", "arguments": {"query": "cup"}, "encrypted_content": "AAAA", "call_id": None}
    compaction = {"type": "compaction", "id": "cmp_1", "encrypted_content": "AAAA"}
    sent = [SEARCH, unnamed, compaction]
    first = await door.ask(PATH, input=[*sent, QUESTION])
    id = first.response.json()["id"]
    listing = await door.gateway.http.get(f"{PATH}/{id}/input_items", params={"order": "asc"})
    data = listing.json()["data"]
    assert data[0] == SEARCH
    assert data[1].pop("id").startswith("item_")
    assert data[1:3] == sent[1:]
    second = await door.ask(PATH, input="Sure?", previous_response_id=id)
    assert second.prompt.startswith(first.prompt.removesuffix("<|im_start|>assistant\n"))
    assert SEARCHED in second.prompt


def additional(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools]}


async def test_tools_of_an_item_are_known_to_the_model_as_those_of_the_request(door: Door) -> None:
    space = {"type": "namespace", "name": "sky", "description": "", "tools": [F, {"type": "custom", "name": "c"}]}
    plain = await door.ask(PATH, input=[QUESTION], tools=[F, space])
    for item in (additional(F, space), additional(F, space) | {"id": "at_1"}):
        asked = await door.ask(PATH, input=[item, QUESTION])
        assert (asked.prompt, asked.ignored, asked.warnings) == (plain.prompt, None, None)
        assert (await door.ask(PATH, input=[QUESTION, item])).prompt == plain.prompt
    counted = await door.ask(f"{PATH}/input_tokens", input=[additional(F, space), QUESTION])
    assert counted.response.json()["input_tokens"] == plain.response.json()["usage"]["input_tokens"]


async def test_a_tool_of_a_later_item_replaces_the_one_of_its_name(door: Door) -> None:
    first, second = (F | {"description": text} for text in ("Old.", "New."))
    plain = await door.ask(PATH, input=[QUESTION], tools=[second])
    for fields in ({"input": [additional(first), additional(second), QUESTION]}, {"tools": [first]}):
        asked = await door.ask(PATH, **{"input": [additional(second), QUESTION], **fields})
        assert asked.prompt == plain.prompt


async def test_tools_of_an_item_may_be_demanded_and_left_out(door: Door) -> None:
    choice = {"type": "function", "name": "f"}
    asked = await door.ask(PATH, input=[additional(F, {"type": "web_search"}), QUESTION], tool_choice=choice)
    assert asked.ignored == "tools.web_search"
    assert door.engine.requests[-1].sampling_params.HasField("grammar")


async def test_a_call_of_an_items_tool_names_its_namespace(door: Door) -> None:
    space = {"type": "namespace", "name": "functions", "description": "", "tools": [{"type": "custom", "name": "exec"}]}
    call = '<tool_call>\n{"name": "functions__exec", "arguments": {"input": "f()"}}\n</tool_call>'
    door.engine.script = lambda request: Reply([*tool_tokenizer().encode(call).ids, EOS])
    answer = (await door.ask(PATH, input=[additional(space), QUESTION])).response.json()
    (item,) = answer["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "functions", "exec")
    assert item["input"] == "f()"
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "1"}
    later = await door.ask(PATH, input=[result], previous_response_id=answer["id"])
    assert later.response.json()["output"][0]["namespace"] == "functions"
    listing = await door.gateway.http.get(f"{PATH}/{answer['id']}/input_items", params={"order": "asc"})
    listed = listing.json()["data"][0]
    assert listed.pop("id").startswith("at_")
    assert listed == additional(space)


async def test_tools_of_all_items_together_are_limited(door: Door) -> None:
    items = [additional(*(F | {"name": f"f{start + i}"} for i in range(600))) for start in (0, 600)]
    assert "There are 1200 tools" in (await door.post(PATH, input=[*items, QUESTION])).error
    assert "at most 1024" in (await door.post(PATH, input=[additional(*[F] * 1025), QUESTION])).error
    assert "developer" in (await door.post(PATH, input=[additional(F) | {"role": "user"}, QUESTION])).error
