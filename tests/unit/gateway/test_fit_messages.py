"""Conversations of every shape in the prompts of templates that do not read every shape."""

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from proa import fit_messages as warning
from proa.chat_template import ChatTemplate
from proa.fit_messages import fit_messages
from proa.template_rules import Message, TemplateRules
from proa_gateway.apis.chat.job import conversation_of
from proa_gateway.apis.chat.protocol import ChatCompletionRequest
from proa_gateway.serving.chat_prompt import fit_reasoning, render_prompt, template_messages
from proa_gateway.serving.conversation import ReasoningFields
from proa_gateway.tokenizer import TemplateRenderer
from support.conversation_shapes import Shape, shapes, words_of
from support.strict_templates import EFFORT_TEMPLATES, READS_ALL, STRICT_TEMPLATES, STRICTEST

SOURCES = {
    "reads all": READS_ALL,
    **{name: source for name, (source, _) in STRICT_TEMPLATES.items()},
    "strictest": STRICTEST,
    **{f"effort: {name}": source for name, (source, _) in EFFORT_TEMPLATES.items()},
}
SHAPES = shapes()
PAGE = Path(__file__).parents[3] / "docs" / "chat-templates.md"
RENDERER = TemplateRenderer({})


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(SOURCES[name])


def render(template: ChatTemplate, shape: Shape) -> str:
    """As `ConversationReader.read` does."""
    request = ChatCompletionRequest.model_validate({"messages": shape.messages, **shape.fields})
    conversation = fit_reasoning(conversation_of(request), template, ReasoningFields()).conversation
    messages, _ = fit_messages(template_messages(request.messages), template.rules)
    return asyncio.run(render_prompt(conversation, messages, template, RENDERER))


def fit(rules: TemplateRules, *messages: Message) -> tuple[list[Message], list[str]]:
    fitted, warnings = fit_messages(messages, rules)
    return list(fitted), list(warnings)


def places(prompt: str, words: Sequence[str]) -> list[int]:
    return [prompt.find(word) for word in words]


def in_order_of_calls(messages: Sequence[dict[str, Any]]) -> list[str]:
    """The words with each result behind its call."""
    results = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    words: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            continue
        words += words_of({**message, "tool_calls": ()})
        for call in message.get("tool_calls", ()):
            words += words_of({"tool_calls": [call]})
            words += [results[call["id"]]] if call["id"] in results else []
    return words


def test_there_are_41_shapes() -> None:
    assert len(SHAPES) == 41


@pytest.mark.parametrize("name", SOURCES)
def test_every_shape_is_accepted_with_all_its_texts_in_their_order(name: str) -> None:
    template = template_of(name)
    for shape_name, shape in SHAPES.items():
        prompt = render(template, shape)
        orders = [shape.words]
        if not (template.rules.several_calls and template.rules.calls):
            orders.append(in_order_of_calls(shape.messages))
        found = [places(prompt, words) for words in orders]
        assert -1 not in found[0], f"{shape_name}: {prompt}"
        assert any(each == sorted(each) for each in found), f"{shape_name}: {prompt}"


@pytest.mark.parametrize("name", SHAPES)
def test_a_template_that_reads_all_gets_the_messages_themselves(name: str) -> None:
    messages = template_messages(ChatCompletionRequest.model_validate({"messages": SHAPES[name].messages}).messages)
    fitted, warnings = fit_messages(messages, template_of("reads all").rules)
    assert fitted is messages
    assert not warnings


@pytest.mark.parametrize("name", SOURCES)
def test_a_conversation_that_grows_keeps_its_earlier_prompt(name: str) -> None:
    """Up to its last text: what ends a message may stand elsewhere once another one is joined to it."""
    template = template_of(name)
    for shape_name, shape in SHAPES.items():
        if shape.fields or shape_name == "twenty turns":
            continue
        # Results of one message's calls come together.
        ends = [
            end
            for end in range(1, len(shape.messages))
            if shape.messages[end]["role"] != "tool" and not shape.messages[end - 1].get("tool_calls")
        ]
        whole = render(template, Shape(shape.messages, {"add_generation_prompt": False}))
        for end in ends:
            earlier = Shape(shape.messages[:end], {"add_generation_prompt": False})
            if not template.rules.system_alone and all(m["role"] in ("system", "developer") for m in earlier.messages):
                continue
            prompt = render(template, earlier)
            last = earlier.words[-1]
            assert whole.startswith(prompt[: prompt.index(last) + len(last)]), f"{shape_name}, {end}: {prompt}\n{whole}"


SYSTEM, LATER = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "It is late."}
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
FUNCTION = {"name": "f", "arguments": '{"a": 1}'}


def call(*ids: str, content: str | None = None, **fields: Any) -> Message:
    calls = [{"id": each, "type": "function", "function": {**FUNCTION, "name": each}} for each in ids]
    return {"role": "assistant", "content": content, **fields, "tool_calls": calls}


def result(id: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": id, "content": f"result {id}"}


def test_a_later_system_message_is_the_users_at_its_place() -> None:
    rules = TemplateRules(later_system=False)
    reminder = {"role": "user", "content": "<system-reminder>\nIt is late.\n</system-reminder>"}
    assert fit(rules, SYSTEM, USER, LATER, LATER, ANSWER) == (
        [SYSTEM, USER, reminder, reminder, ANSWER],
        [warning.LATER_SYSTEM],
    )
    parts = [{"type": "text", "text": "One."}, {"type": "image"}]
    fitted, _ = fit(rules, USER, {"role": "developer", "content": parts})
    before, after = ({"type": "text", "text": text} for text in warning.REMINDER)
    assert fitted[1] == {"role": "user", "content": [before, *parts, after]}


def test_system_messages_at_the_start_are_joined() -> None:
    rules = TemplateRules(several_system=False, later_system=False)
    assert fit(rules, SYSTEM, {**LATER, "role": "developer"}, USER) == (
        [{"role": "system", "content": "Be brief.\n\nIt is late."}, USER],
        [warning.ONE_SYSTEM],
    )


def test_parts_stay_parts_when_messages_are_joined() -> None:
    image = {"type": "image"}
    noted = {"type": "text", "text": "One.", "note": "x"}
    rules = TemplateRules(users=False)
    [joined], _ = fit(rules, {"role": "user", "content": [image, noted]}, USER, {"role": "user", "content": [image]})
    texts = [{**noted, "text": "One.\n\n"}, {"type": "text", "text": "Hi\n\n"}]
    assert joined["content"] == [image, *texts, image]
    [joined], _ = fit(rules, {"role": "user", "content": [image]}, USER)
    assert joined["content"] == [image, {"type": "text", "text": "\n\n"}, {"type": "text", "text": "Hi"}]


@pytest.mark.parametrize(("users", "warnings"), [(True, []), (False, [warning.USERS])])
def test_a_template_without_a_system_role_gets_it_as_the_users(users: bool, warnings: list[str]) -> None:
    fitted, given = fit(TemplateRules(system=False, later_system=False, users=users), SYSTEM, USER)
    as_user = {**SYSTEM, "role": "user"}
    assert fitted == ([as_user, USER] if users else [{"role": "user", "content": "Be brief.\n\nHi"}])
    assert given == [warning.NO_SYSTEM, *warnings]


def test_calls_and_results_become_texts() -> None:
    fitted, warnings = fit(TemplateRules(calls=False), USER, call("f", content="Look:"), result("f"), result("g"))
    assert fitted == [
        USER,
        {"role": "assistant", "content": 'Look:\n\n[call of f: {"a": 1}]'},
        {"role": "user", "content": "[result of f]\nresult f"},
        {"role": "user", "content": "[result of g]\nresult g"},
    ]
    assert warnings == [warning.NO_CALLS]


def test_a_call_without_a_result_becomes_text_once_the_user_goes_on() -> None:
    rules = TemplateRules(open_calls=False)
    assert fit(rules, USER, call("f")) == ([USER, call("f")], [])
    assert fit(rules, USER, call("f", "g"), result("f")) == ([USER, call("f", "g"), result("f")], [])
    as_text = {"role": "assistant", "content": '[call of f: {"a": 1}]'}
    assert fit(rules, USER, call("f"), USER) == ([USER, as_text, USER], [warning.OPEN_CALL])
    fitted, _ = fit(rules, USER, call("f", "g", thinking="Hm."), result("g"), USER)
    assert fitted == [USER, {**as_text, "thinking": "Hm."}, call("g"), result("g"), USER]


def test_each_call_gets_a_message_with_its_result() -> None:
    rules = TemplateRules(several_calls=False)
    sent = [USER, call("f", "g", content="Both.", reasoning="Hm."), result("g"), result("f"), USER]
    fitted, warnings = fit(rules, *sent)
    first = call("f", content="Both.", reasoning="Hm.")
    assert fitted == [USER, first, result("f"), call("g"), result("g"), USER]
    assert warnings == [warning.ONE_CALL]


def test_text_that_is_not_read_beside_a_call_comes_before_it() -> None:
    rules = TemplateRules(text_with_calls=False, thought_text_with_calls=False)
    text = {"role": "assistant", "content": "Look:"}
    fitted, warnings = fit(rules, USER, call("f", content="Look:", reasoning="Hm."), result("f"))
    assert fitted == [USER, text, call("f", reasoning="Hm."), result("f")]
    assert warnings == [warning.TEXT_APART]


def test_text_that_is_read_neither_beside_a_call_nor_before_makes_the_call_text() -> None:
    rules = TemplateRules(text_with_calls=False, thought_text_with_calls=False, text_before_calls=False)
    fitted, warnings = fit(rules, USER, call("f", content="Look:"), result("f"), call("g"), result("g"))
    as_text = {"role": "assistant", "content": 'Look:\n\n[call of f: {"a": 1}]'}
    assert fitted == [USER, as_text, {"role": "user", "content": "[result of f]\nresult f"}, call("g"), result("g")]
    assert warnings == [warning.CALL_BESIDE_TEXT]
    fitted, warnings = fit(TemplateRules(text_before_calls=False), USER, ANSWER, call("f"), result("f"))
    assert fitted == [USER, call("f", content="Hello"), result("f")]
    assert warnings == [warning.TEXT_BESIDE]


def test_neighbours_that_cannot_follow_each_other_are_joined() -> None:
    rules = TemplateRules(users=False, answers=False, answer_first=False, user_after_result=False)
    sent = [SYSTEM, ANSWER, ANSWER, USER, USER, call("f"), result("f"), USER]
    fitted, warnings = fit(rules, *sent)
    assert fitted == [
        SYSTEM,
        {"role": "user", "content": "."},
        {"role": "assistant", "content": "Hello\n\nHello"},
        {"role": "user", "content": "Hi\n\nHi"},
        call("f"),
        {**result("f"), "content": "result f\n\nHi"},
    ]
    assert warnings == [warning.ANSWER_FIRST, warning.ANSWERS, warning.USERS, warning.USER_AFTER_RESULT]


def test_a_call_alone_has_the_content_that_the_template_reads() -> None:
    for content in (None, ""):
        assert fit(TemplateRules(null_content=False), call("f", content=content))[0] == [call("f", content="")]
        assert fit(TemplateRules(empty_content=False), call("f", content=content))[0] == [call("f")]


def test_ids_of_calls_are_numbered() -> None:
    fitted, _ = fit(TemplateRules(any_ids=False), call("f", "g"), result("g"), result("f"), call("h"), result("x"))
    ids = [[each["id"] for each in message.get("tool_calls", ())] or message["tool_call_id"] for message in fitted]
    assert ids == [["call00000", "call00001"], "call00001", "call00000", ["call00002"], "call00003"]


def test_the_messages_are_not_changed() -> None:
    for shape in SHAPES.values():
        request = ChatCompletionRequest.model_validate({"messages": shape.messages})
        messages = template_messages(request.messages)
        copy = [dict(message) for message in messages]
        fit_messages(messages, template_of("strictest").rules)
        assert messages == copy


def test_the_page_has_every_warning() -> None:
    page = PAGE.read_text()
    start, *_ = warning.ONE_SYSTEM.partition(" one system")
    warnings = [text for text in vars(warning).values() if isinstance(text, str) and text.startswith(f"{start} ")]
    assert len(warnings) == 14
    assert f"`{start}`" in page
    assert [text for text in warnings if f"| `{text.removeprefix(start + ' ')}` |" not in page] == []
