"""The history of a conversation in the prompt: the same text as from transformers."""

import asyncio
import json
from typing import Any

import pytest
import transformers

from proa.chat_template import ChatTemplate, ChatTemplateError
from proa_gateway.apis.chat.job import conversation_of
from proa_gateway.apis.chat.protocol import ChatCompletionRequest
from proa_gateway.serving.chat_prompt import Arguments, call_arguments, render_prompt, template_messages
from proa_gateway.tokenizer import TemplateRenderer
from support.chat import TOOL_TEMPLATES
from support.tokenizers import byte_level_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}},
        "name": "get_weather",
        "description": "Wetter für <b>heute</b>",
    },
}
ARGUMENTS = {"city": "Köln", "days": 3, "deep": {"list": [1, None, True, 2.5]}}
family = pytest.mark.parametrize("name", TOOL_TEMPLATES)


def render(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    request = ChatCompletionRequest.model_validate({"messages": messages, **fields})
    read = template_messages(request.messages)
    return asyncio.run(render_prompt(conversation_of(request), read, ChatTemplate(source), TemplateRenderer({})))


def reference(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    text = tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True, **variables
    )
    assert isinstance(text, str)
    return text


def history(arguments: Any, content: Any = None, **fields: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather? <think>"},
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": function},
                {"id": "call_2", "type": "function", "function": function},
            ],
            **fields,
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "12 °C"},
        {"role": "tool", "tool_call_id": "call_2", "name": "get_weather", "content": '{"rain": false}'},
    ]


@family
@pytest.mark.parametrize("sent", [ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, ensure_ascii=False)])
@pytest.mark.parametrize("content", ["", "Let me look."])
def test_the_prompt_equals_that_of_transformers(name: str, sent: Any, content: Any) -> None:
    source, takes_text = TOOL_TEMPLATES[name]
    expected = sent if isinstance(sent, str) else json.dumps(sent, ensure_ascii=False)
    given = history(expected if takes_text else ARGUMENTS, content)
    assert render(source, history(sent, content), tools=[WEATHER]) == reference(source, given, tools=[WEATHER])


@family
def test_content_null_is_the_same_as_for_transformers(name: str) -> None:
    source, _ = TOOL_TEMPLATES[name]
    if ChatTemplate(source).tests_none:  # transformers removes what the template tests for
        assert '{"a": 1}\n```' in render(source, history('{"a": 1}'), tools=[WEATHER])
    else:
        assert render(source, history({"a": 1}), tools=[WEATHER]) == reference(
            source, history({"a": 1}), tools=[WEATHER]
        )


@family
def test_a_history_without_tools_equals_that_of_transformers(name: str) -> None:
    source, _ = TOOL_TEMPLATES[name]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "?"},
    ]
    assert render(source, messages) == reference(source, messages)


@pytest.mark.parametrize("sent", ["{broken", "[1]", '"text"', "12"])
def test_arguments_that_are_no_object_stay_text(sent: str) -> None:
    assert render("{{ messages[2].tool_calls[0].function.arguments }}", history(sent)) == sent


def test_a_lone_surrogate_in_arguments_stays_escaped() -> None:
    assert call_arguments('{"a": "\\ud800"}') == '{"a": "\\ud800"}'
    assert call_arguments('{"a": "\\ud83d\\ude00"}') == {"a": "😀"}


@pytest.mark.parametrize("sent", ["", None, {}])
def test_no_arguments_are_an_empty_object(sent: Any) -> None:
    assert render("{{ messages[2].tool_calls[0].function.arguments | tojson }}", history(sent)) == "{}"


def test_arguments_read_as_a_mapping_and_write_as_text() -> None:
    arguments = call_arguments('{"b": 1, "a": 2}')
    assert isinstance(arguments, Arguments)
    source = (
        "{{ '<' + a + '>' }} {{ a ~ '!' }} {{ a }} {{ a.b }} {{ a is mapping }} {{ a | tojson }} {{ a.items() | list }}"
    )
    rendered = ChatTemplate(source).render([], {"a": arguments})
    text = '{"b": 1, "a": 2}'
    assert rendered == f"<{text}> {text}! {text} 1 True {text} [('b', 1), ('a', 2)]"


def test_a_result_gets_the_name_of_its_call() -> None:
    messages = history(ARGUMENTS)
    del messages[3]["name"]
    source = "{% for m in messages if m.role == 'tool' %}{{ m.name }} {{ m.tool_call_id }},{% endfor %}"
    assert render(source, messages) == "get_weather call_1,get_weather call_2,"


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_the_history_has_all_its_names(sent: str) -> None:
    messages = history(ARGUMENTS, **{sent: "hm"})
    source = (
        "{% set m = messages[2] %}{{ m.reasoning_content }}{{ m.reasoning }}{{ m.thinking }}{{ messages[0].thinking }}"
    )
    assert render(source, messages) == "hmhmhm"


def test_tools_keep_the_order_of_their_keys_and_lose_strict() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    assert render("{{ tools | tojson }}", [{"role": "user"}], tools=[strict]) == json.dumps(
        [WEATHER], ensure_ascii=False
    )


def test_tools_are_left_out_with_tool_choice_none() -> None:
    source = "{{ tools is defined }}"
    assert render(source, [{"role": "user"}], tools=[WEATHER], tool_choice="none") == "False"
    assert render(source, [{"role": "user"}], tools=[WEATHER], tool_choice="auto") == "True"


def test_arguments_cannot_be_changed_by_a_template() -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ a.update({'b': 2}) }}").render([], {"a": call_arguments('{"b": 1}')})
