"""Which tool format a model has: by name, by its tokenizer's response template, by its chat template."""

from dataclasses import replace
from typing import Any

import pytest

from proa.contract import Grammar
from proa_gateway.parsing.choose import FormatChoice, choose_format, format_of_response_template
from proa_gateway.parsing.format import CallObject, Json, ObjectLiteral, Tagged, ToolFormat
from proa_gateway.parsing.formats import FORMATS
from proa_gateway.parsing.grammars.message import Reasoning, answer_grammar
from proa_gateway.parsing.json_formats import HERMES
from proa_gateway.parsing.known_formats import BUILT_IN
from proa_gateway.parsing.tagged_formats import QWEN3_CODER

HERMES_TEMPLATE = (
    """{{- content.split('</think>') }}{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
)
REASONING = {"open": "<think>", "close": "</think>", "content": "text"}


def response_template(calls: dict[str, Any], reasoning: object = REASONING) -> dict[str, Any]:
    return {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"reasoning_content": reasoning, "tool_calls": calls, "content": {"content": "text"}},
    }


ENVELOPE_CALLS = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}


def choose(
    template: str = "", *, name: str | None = None, described: object = None, unread: tuple[str, ...] = ()
) -> FormatChoice:
    """`unread`: names of formats that do not read the template's call."""
    return choose_format(name, described, template, BUILT_IN, lambda each: each.name not in unread)


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.name)
def test_format_is_found_by_its_name_and_has_reasoning_if_the_template_has(each: ToolFormat) -> None:
    assert choose("", name=each.name).tool_format == replace(each, reasoning=None)
    template = each.reasoning[1] if each.reasoning is not None else ""
    assert choose(template, name=each.name).tool_format is each


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.name)
def test_without_reasoning_in_the_template_an_answer_is_constrained_from_its_first_token(each: ToolFormat) -> None:
    named = choose(name=each.name).tool_format
    assert named is not None
    made = answer_grammar(named, Grammar(text='start: "yes"\n'), reasoning=Reasoning.OPTIONAL, added_tokens={})
    assert (made.start_after, made.free_if_first) == ((), ())


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown tool format 'x'.*hermes"):
        choose(HERMES_TEMPLATE, name="x")


def test_format_is_found_by_its_signs_in_the_chat_template() -> None:
    assert choose(HERMES_TEMPLATE) == FormatChoice(HERMES)


def test_format_has_no_reasoning_if_the_chat_template_has_none() -> None:
    template = HERMES_TEMPLATE.replace("</think>", "")
    assert choose(template).tool_format == replace(HERMES, reasoning=None)


def test_a_format_that_does_not_read_the_templates_call_is_not_chosen() -> None:
    assert choose(HERMES_TEMPLATE, unread=("hermes",)) == FormatChoice(None, unread="hermes")


def test_of_the_formats_whose_signs_stand_in_the_template_the_first_is_chosen_that_reads_its_call() -> None:
    template = HERMES_TEMPLATE + "<function= <parameter="
    assert choose(template).tool_format is QWEN3_CODER
    assert choose(template, unread=("qwen3_coder",)) == FormatChoice(HERMES)


def test_a_named_format_is_chosen_even_if_it_does_not_read_the_templates_call() -> None:
    assert choose(HERMES_TEMPLATE, name="hermes", unread=("hermes",)) == FormatChoice(HERMES, unread="hermes")


@pytest.mark.parametrize("template", ["", "{{ messages }} <tool_call>"])
def test_a_chat_template_without_the_signs_has_no_format(template: str) -> None:
    assert choose(template) == FormatChoice(None)


def test_response_template_counts_before_the_chat_template() -> None:
    calls = {"open_pattern": r"<call>\s*(?P<name>\w+)", "close": "</call>", "content": "json"}
    found = choose(HERMES_TEMPLATE, described=response_template(calls)).tool_format
    assert found is not None
    assert (found.name, found.call) == ("response_template", "<call>$name$arguments</call>")


def test_response_template_of_a_known_format_is_that_format() -> None:
    assert choose(described=response_template(ENVELOPE_CALLS)).tool_format is HERMES


def test_response_template_with_an_envelope() -> None:
    found = format_of_response_template(response_template(ENVELOPE_CALLS))
    assert found is not None
    assert isinstance(found.arguments, CallObject)
    assert found.call == '<tool_call>{"name": "$name", "arguments": $arguments}</tool_call>'
    assert found.reasoning == ("<think>", "</think>")


def test_response_template_with_tags() -> None:
    found = format_of_response_template(
        response_template(
            {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            }
        )
    )
    assert found is not None
    assert found.call == "<tool_call><function=$name>$arguments</function></tool_call>"
    assert found.arguments == Tagged("<parameter=$key>$value</parameter>")


def test_response_template_with_bare_keys() -> None:
    calls = {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    }
    found = format_of_response_template(response_template(calls, reasoning=None))
    assert found is not None
    assert found.call == "<|tool_call>call:$name{$arguments}<tool_call|>"
    assert (found.arguments, found.reasoning) == (ObjectLiteral('<|"|>'), None)


def test_response_template_with_plain_json() -> None:
    calls = {"open_pattern": r"\[TOOL\](?P<name>\w+)\[ARGS\]", "close": "", "content": "json"}
    found = format_of_response_template(response_template(calls))
    assert found is not None
    assert (found.call, found.arguments) == ("[TOOL]$name[ARGS]$arguments", Json())


@pytest.mark.parametrize(
    "template",
    [
        None,
        "text",
        {},
        {"fields": []},
        {"fields": {"content": {"content": "text"}}},
        response_template({**ENVELOPE_CALLS, "open_pattern": "<a>|<b>"}),
        response_template({**ENVELOPE_CALLS, "close": ["</a>", "</b>"]}),
        response_template({**ENVELOPE_CALLS, "content": "text"}),
        response_template({**ENVELOPE_CALLS, "transform": None}),
        response_template({**ENVELOPE_CALLS, "content_args": {"unquoted_keys": True}}),
        response_template({"open": "<call>", "close": "</call>", "content": "xml-inline", "content_args": {}}),
    ],
)
def test_other_response_templates_describe_no_format(template: object) -> None:
    assert format_of_response_template(template) is None
