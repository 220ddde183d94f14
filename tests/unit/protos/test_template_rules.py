"""What a chat template reads, found by rendering short conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import pytest

from proa.chat_template import ChatTemplate
from proa.template_rules import EFFORTS, Message, TemplateRules, find_rules, nearest_effort
from support.strict_templates import EFFORT_TEMPLATES, READS_ALL, STRICT_TEMPLATES, STRICTEST

MAX_RENDERINGS = 30


def rules_of(source: str) -> TemplateRules:
    template, num_renderings = ChatTemplate(source), 0

    def render(messages: Sequence[Message], variables: Mapping[str, object]) -> str:
        nonlocal num_renderings
        num_renderings += 1
        return template.render(messages, variables)

    found = find_rules(render, template.content_forms, variables=template.variables, keeps_null=template.tests_none)
    assert num_renderings <= MAX_RENDERINGS
    assert (found, found.efforts) == (template.rules, template.rules.efforts)
    return found


def test_a_template_that_reads_all_has_no_rules() -> None:
    rules = rules_of(READS_ALL)
    assert rules == TemplateRules()
    assert rules.takes_all


@pytest.mark.parametrize("name", STRICT_TEMPLATES)
def test_a_rule_is_found_and_no_other(name: str) -> None:
    source, expected = STRICT_TEMPLATES[name]
    rules = rules_of(source)
    assert rules == expected
    assert not rules.takes_all


def test_every_rule_has_a_template() -> None:
    names = {each.name for each in fields(TemplateRules)} - {"efforts"}
    assert names == {name for _, rules in STRICT_TEMPLATES.values() for name in names if not getattr(rules, name)}


def test_nothing_is_found_out_about_a_template_that_leaves_out_the_user() -> None:
    assert rules_of("{{ messages[0].role }}").takes_all


def test_several_rules_are_found_at_once() -> None:
    rules = rules_of(STRICTEST)
    kept = {each.name for each in fields(rules) if each.name != "efforts" and getattr(rules, each.name)}
    assert kept == {"system", "calls", "empty_content"}


@pytest.mark.parametrize("name", EFFORT_TEMPLATES)
def test_accepted_efforts_are_found(name: str) -> None:
    source, efforts = EFFORT_TEMPLATES[name]
    rules = rules_of(source)
    assert tuple(rules.efforts) == efforts
    assert rules == TemplateRules()


@pytest.mark.parametrize(
    ("accepted", "nearest"),
    [
        (EFFORTS, {effort: effort for effort in EFFORTS}),
        (
            ("low", "medium", "high"),
            {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "xhigh": "high", "max": "high"},
        ),
        (("none", "low", "medium", "xhigh"), {"none": "none", "minimal": "low", "high": "xhigh", "max": "xhigh"}),
        (("none",), {"none": "none", "low": None}),
        ((), {"none": None, "low": None}),
    ],
)
def test_an_effort_becomes_the_nearest_of_two_as_near_the_higher(
    accepted: tuple[str, ...], nearest: Mapping[str, str | None]
) -> None:
    assert {effort: nearest_effort(effort, accepted) for effort in nearest} == nearest


def test_a_template_that_takes_too_long_reads_all() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ reasoning_effort }}"
    assert replace(ChatTemplate(source).rules, efforts=()) == TemplateRules()
    assert ChatTemplate(source).rules.efforts == EFFORTS
