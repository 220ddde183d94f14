"""Chat templates, with the features that models use, in a sandbox."""

import json
from typing import Any

import pytest

from proa.chat_template import ChatTemplate, ChatTemplateError, special_tokens, template_source

MESSAGES = [{"role": "user", "content": "Grüße <b>"}]


def render(source: str, /, **variables: Any) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render(MESSAGES, variables)


def test_special_tokens_and_variables_are_visible() -> None:
    assert render("{{ bos_token }}{{ thinking }}{{ add_generation_prompt }}", thinking=1) == "<s>1True"


def test_variables_have_any_name_and_do_not_replace_messages() -> None:
    variables = {"self": 1, "messages": [], "add_generation_prompt": False, "bos_token": "x"}
    assert render("{{ messages[0].role }} {{ add_generation_prompt }} {{ bos_token }}", **variables) == "user True x"


def test_block_tags_leave_no_blank_lines() -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    assert render(source) == "Grüße <b>\n"


def test_tojson_does_not_escape_html() -> None:
    assert render("{{ messages | tojson }}") == json.dumps(MESSAGES, ensure_ascii=False)
    assert render("{{ messages[0] | tojson(indent=2) }}") == json.dumps(MESSAGES[0], ensure_ascii=False, indent=2)


def test_loop_controls_and_generation_blocks_work() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}!") == "user!"


def test_the_date_is_todays() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('not like this') }}",
        "{{ messages[5].content + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ 'x' | int + 'y' }}",
        "{{ messages | map('dictsort') | list }}{{ 'x' | dictsort }}",
    ],
)
def test_a_template_that_fails_raises_a_chat_template_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_template_that_does_not_compile_is_rejected() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_template_comes_from_its_file_then_the_configuration() -> None:
    assert template_source({"chat_template": "a"}, b"file") == "file"
    assert template_source({"chat_template": "a"}, None) == "a"
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert template_source({"chat_template": several}, None) == "d"
    assert template_source({}, None) is None


def test_a_chat_with_tools_uses_the_template_for_them() -> None:
    several = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert template_source({"chat_template": several}, None, tools=True) == "t"
    assert template_source({"chat_template": several}, None) == "d"
    assert template_source({"chat_template": several[:1]}, None, tools=True) == "d"
    assert template_source({"chat_template": "a"}, None, tools=True) == "a"
    assert template_source({"chat_template": several}, b"file", tools=True) == "file"


def test_a_template_says_whether_it_tests_for_none() -> None:
    assert ChatTemplate("{% if messages[0].content is none %}{% endif %}").tests_none
    assert ChatTemplate("{% if tools is not none %}{% endif %}").tests_none
    assert not ChatTemplate("{{ 'is none' }}{{ messages is defined }}").tests_none


def test_special_tokens_are_strings_or_objects() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "other": "x"}
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}
