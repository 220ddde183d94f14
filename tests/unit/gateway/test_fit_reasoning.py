"""Reasoning fields of APIs whose clients send them to any model, and templates that use some of them."""

import pytest

from proa.chat_template import ChatTemplate
from proa_gateway.serving.chat_prompt import fit_reasoning
from proa_gateway.serving.conversation import Conversation, ReasoningFields
from proa_gateway.serving.fields import Effort

NEITHER, SWITCH, EFFORT, BOTH = (
    ChatTemplate(source)
    for source in ("", "{{ enable_thinking }}", "{{ reasoning_effort }}", "{{ enable_thinking }}{{ reasoning_effort }}")
)
ON = {"enable_thinking": True}


def conversation(effort: Effort | None = None, **template_kwargs: object) -> Conversation:
    return Conversation(messages=[], reasoning_effort=effort, template_kwargs=template_kwargs)


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
    fitted, unused = fit_reasoning(conversation("low"), template, ReasoningFields(True, "thinking", "effort"))
    assert (fitted.reasoning_effort, fitted.template_kwargs, unused) == (kept, kwargs, ignored)


@pytest.mark.parametrize(
    ("template", "kept", "kwargs", "ignored"),
    [(NEITHER, None, {}, ["effort"]), (SWITCH, None, ON, []), (EFFORT, "low", {}, []), (BOTH, "low", ON, [])],
)
def test_one_field_that_is_both_is_used_where_either_is(
    template: ChatTemplate, kept: Effort | None, kwargs: dict[str, bool], ignored: list[str]
) -> None:
    fitted, unused = fit_reasoning(conversation("low"), template, ReasoningFields(True, "effort", "effort"))
    assert (fitted.reasoning_effort, fitted.template_kwargs, unused) == (kept, kwargs, ignored)


def test_the_requests_own_template_variables_stay() -> None:
    sent = conversation(None, enable_thinking=False, other=1)
    for thinking in (None, True):
        fitted, unused = fit_reasoning(sent, SWITCH, ReasoningFields(thinking, "effort", "effort"))
        assert (fitted, unused) == (sent, [])
