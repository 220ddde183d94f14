"""The items of a response, as its events are added."""

from typing import Any

from proa.contract import TokenLogprobs
from proa_gateway.apis.responses.output import OutputItems
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
)


def output(*, includes_reasoning: bool = True, logprobs: bool = False) -> OutputItems:
    def render(entries: Any) -> list[dict[str, Any]]:
        return [{"token": chr(entry.token_id), "bytes": [entry.token_id]} for entry in entries]

    return OutputItems(includes_reasoning=includes_reasoning, logprobs=render if logprobs else None)


def delta(tokens: str = "", finish_reason: Any = None) -> Delta:
    entries = [
        TokenLogprobs(token_id=ord(token), logprob=0.0, rank=1, top_token_ids=(), top_logprobs=()) for token in tokens
    ]
    return Delta(logprobs=entries, finish_reason=finish_reason)


def kinds(items: OutputItems, events: list[MessageEvent], finish_reason: Any = None) -> list[str]:
    added = items.add(events, delta(finish_reason=finish_reason))
    return [kind.removeprefix("response.") for kind, _ in added]


def statuses(items: OutputItems) -> list[tuple[str, str]]:
    return [(item["type"], item["status"]) for item in items.items]


def test_an_item_ends_when_another_one_begins() -> None:
    items = output()
    assert kinds(items, [ReasoningDelta("a")]) == ["output_item.added", "content_part.added", "reasoning_text.delta"]
    assert kinds(items, [ReasoningDelta("b"), ContentDelta("c")]) == [
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
    ]
    call: list[MessageEvent] = [CallStarted(0, "c", "f"), ArgumentsDelta(0, "{"), ArgumentsDelta(0, "}"), CallEnded(0)]
    assert kinds(items, call)[-4:] == [
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds(items, [], "stop") == []
    assert statuses(items) == [("reasoning", "completed"), ("message", "completed"), ("function_call", "completed")]
    assert items.items[0]["content"] == [{"type": "reasoning_text", "text": "ab"}]
    assert items.items[2]["arguments"] == "{}"


def test_the_last_item_is_incomplete_at_the_limit() -> None:
    text, call = output(), output()
    text.add([ContentDelta("a")], delta(finish_reason="length"))
    call.add([CallStarted(0, "c", "f"), ArgumentsDelta(0, "{"), CallEnded(0)], delta(finish_reason="length"))
    assert statuses(text) == [("message", "incomplete")]
    assert statuses(call) == [("function_call", "incomplete")]


def test_reasoning_that_is_not_shown_has_no_item() -> None:
    items = output(includes_reasoning=False)
    assert kinds(items, [ReasoningDelta("a")], "stop") == []
    assert items.items == []


def test_log_probabilities_are_those_of_the_text_alone() -> None:
    items = output(logprobs=True)
    items.add([ReasoningDelta("x")], delta("x"))
    items.add([], delta("|"))  # the token that closes reasoning
    items.add([], delta("\n"))
    items.add([ContentDelta("a")], delta("a"))
    items.add([], delta("b"))  # held back
    added = items.add([ContentDelta("bc")], delta("c"))
    items.add([CallStarted(0, "c", "f"), CallEnded(0)], delta("<>"))
    items.add([], delta("$", "stop"))
    assert [entry["token"] for entry in added[0][1]["logprobs"]] == ["b", "c"]
    (part,) = items.items[1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b", "c"]


def test_every_event_tells_its_item() -> None:
    items = output()
    events = items.add([ContentDelta("a"), CallStarted(0, "c", "f"), CallEnded(0)], delta(finish_reason="stop"))
    assert [fields["output_index"] for _, fields in events] == [0] * 6 + [1] * 3
    ids = {fields.get("item_id") or fields["item"]["id"] for _, fields in events}
    assert ids == {item["id"] for item in items.items}
