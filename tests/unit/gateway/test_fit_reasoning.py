"""Reasoning fields, and templates that use some of them."""

from collections.abc import Mapping, Sequence

import pytest

from proa.chat_template import ChatTemplate
from proa_gateway.serving.chat_prompt import fit_reasoning
from proa_gateway.serving.conversation import Conversation, ReasoningFields
from proa_gateway.serving.fields import Effort

SWITCHED = "{% if reasoning_effort not in ('low', 'xhigh') and enable_thinking is not false %}{{ 1 / 0 }}{% endif %}"
NEITHER, SWITCH, EFFORT, BOTH, CHECKED, WORD = (
    ChatTemplate(source)
    for source in (
        "",
        "{{ enable_thinking }}",
        "{% if reasoning_effort == 'max' %}!{% endif %}",
        "{{ enable_thinking }}{% if reasoning_effort == 'max' %}!{% endif %}",
        SWITCHED,
        "{{ reasoning_effort }}",
    )
)
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


def conversation(effort: Effort | None = None, **template_kwargs: object) -> Conversation:
    return Conversation(messages=[], reasoning_effort=effort, template_kwargs=template_kwargs)


def fit(
    sent: Conversation, template: ChatTemplate, fields: ReasoningFields
) -> tuple[Effort | None, Mapping[str, object], Sequence[str], Sequence[str]]:
    fitted = fit_reasoning(sent, template, fields)
    kept = fitted.conversation
    return kept.reasoning_effort, kept.template_kwargs, fitted.unused_fields, fitted.warnings


@pytest.mark.parametrize(
    ("template", "kept", "kwargs", "ignored"),
    [
        (NEITHER, None, {}, ["thinking", "effort"]),
        (SWITCH, None, ON, ["effort"]),
        (EFFORT, "low", {}, ["thinking"]),
        (BOTH, "low", ON, []),
    ],
)
def test_two_fields_are_dropped_where_they_are_not_used(
    template: ChatTemplate, kept: Effort | None, kwargs: dict[str, bool], ignored: list[str]
) -> None:
    fields = ReasoningFields("effort", True, "thinking")
    assert fit(conversation("low"), template, fields) == (kept, kwargs, ignored, [])


@pytest.mark.parametrize(
    ("template", "kept", "kwargs", "ignored"),
    [(NEITHER, None, {}, ["effort"]), (SWITCH, None, ON, []), (EFFORT, "low", {}, []), (BOTH, "low", ON, [])],
)
def test_one_field_that_is_both_is_used_where_either_is(
    template: ChatTemplate, kept: Effort | None, kwargs: dict[str, bool], ignored: list[str]
) -> None:
    fields = ReasoningFields("effort", True, "effort")
    assert fit(conversation("low"), template, fields) == (kept, kwargs, ignored, [])


@pytest.mark.parametrize(
    ("template", "kept", "kwargs", "ignored"),
    [
        (NEITHER, None, {}, ["effort"]),
        (SWITCH, None, OFF, []),
        (EFFORT, "none", {}, []),
        (BOTH, "none", OFF, []),
        (CHECKED, "none", OFF, []),
    ],
)
def test_the_effort_none_switches_reasoning_off_where_there_is_a_switch(
    template: ChatTemplate, kept: Effort | None, kwargs: dict[str, bool], ignored: list[str]
) -> None:
    assert fit(conversation("none"), template, ReasoningFields("effort")) == (kept, kwargs, ignored, [])


@pytest.mark.parametrize(
    ("template", "sent", "kept", "levels"),
    [
        (CHECKED, "high", "xhigh", "none, low, xhigh"),
        (CHECKED, "minimal", "low", "none, low, xhigh"),
        (WORD, "max", "high", "low, medium, high"),
        (WORD, "none", "low", "low, medium, high"),
    ],
)
def test_an_effort_becomes_the_nearest_that_the_template_accepts(
    template: ChatTemplate, sent: Effort, kept: Effort, levels: str
) -> None:
    warning = f"effort: {sent} became {kept}: the model's chat template accepts {levels}"
    assert fit(conversation(sent), template, ReasoningFields("effort")) == (kept, {}, [], [warning])


def test_an_accepted_effort_stays() -> None:
    for effort in ("low", "xhigh"):
        assert fit(conversation(effort), CHECKED, ReasoningFields("effort")) == (effort, {}, [], [])


def test_the_requests_own_template_variables_stay() -> None:
    sent = conversation(None, enable_thinking=False, other=1)
    for thinking in (None, True):
        fitted = fit_reasoning(sent, SWITCH, ReasoningFields("effort", thinking, "effort"))
        assert (fitted.conversation, fitted.unused_fields) == (sent, [])
