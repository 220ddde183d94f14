"""The events and the content of a message, as the official client assembles and checks them."""

import json
from collections.abc import Sequence
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from proa_gateway.apis.messages.render import MessagesChoice, event_of, usage_of
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
)
from proa_gateway.serving.choices import Usage

HEAD = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=6)
EVENTS: Sequence[MessageEvent] = (
    ReasoningDelta("Let me "),
    ReasoningDelta("see."),
    ContentDelta("One moment."),
    CallStarted(0, "a", "weather"),
    ArgumentsDelta(0, '{"city": '),
    ArgumentsDelta(0, '"Köln"}'),
    CallEnded(0),
    CallStarted(1, "b", "time"),
    CallEnded(1),
)


def stream(events: Sequence[MessageEvent], last: Delta, *, reasoning: bool = True) -> list[dict[str, Any]]:
    choice = MessagesChoice(HEAD, includes_reasoning=reasoning, ends_at_context=False)
    data = choice.opening(USAGE)
    for event in events:
        data += choice.event([event], Delta(), None)
    data += choice.event([], last, None)
    data += event_of("message_delta", delta=choice.stop, usage=usage_of(USAGE)) + event_of("message_stop")
    lines = [line for line in data.decode().split("\n") if line]
    values = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [value["type"] for value in values]
    return values


def assembled(values: Sequence[dict[str, Any]]) -> Message:
    """What the official client makes of the events."""
    adapter: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    message: Any = None
    buffers: dict[int, bytes] = {}
    for value in values:
        if value["type"] != "ping":
            message = accumulate_event(
                event=adapter.validate_python(value), current_snapshot=message, json_bufs=buffers
            )
    assert isinstance(message, Message)
    return message


def test_the_client_assembles_the_message_that_is_sent_as_a_whole() -> None:
    last = Delta(finish_reason="stop")
    message = assembled(stream(EVENTS, last))
    merged = [ReasoningDelta("Let me see."), *EVENTS[2:]]
    final = MessagesChoice(HEAD, includes_reasoning=True, ends_at_context=False).final(merged, last)
    assert (
        message.model_dump(warnings=False) == Message.model_validate({**final, "usage": usage_of(USAGE)}).model_dump()
    )
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == 4
    assert message.usage.cache_read_input_tokens == 6


def test_every_block_is_opened_and_closed_once() -> None:
    values = stream(EVENTS, Delta(finish_reason="stop"))
    starts = [value["index"] for value in values if value["type"] == "content_block_start"]
    stops = [value["index"] for value in values if value["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]


def test_reasoning_that_is_not_wanted_is_left_out() -> None:
    message = assembled(stream(EVENTS[:3], Delta(finish_reason="stop"), reasoning=False))
    assert [block.type for block in message.content] == ["text"]


def test_reasons_of_the_end() -> None:
    content = [ContentDelta("a")]
    for last, reason, sequence in (
        (Delta(finish_reason="stop"), "end_turn", None),
        (Delta(finish_reason="stop", stop_reason="END"), "stop_sequence", "END"),
        (Delta(finish_reason="stop", stop_reason=7), "end_turn", None),
        (Delta(finish_reason="length"), "max_tokens", None),
    ):
        message = assembled(stream(content, last))
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_arguments_that_were_cut_off_are_passed_on() -> None:
    events: list[MessageEvent] = [CallStarted(0, "a", "weather"), ArgumentsDelta(0, '{"city": "K'), CallEnded(0)]
    final = MessagesChoice(HEAD, includes_reasoning=True, ends_at_context=False).final(
        events, Delta(finish_reason="length")
    )
    assert final["content"][0]["input"] == {"arguments": '{"city": "K'}
    assert final["stop_reason"] == "max_tokens"


def test_a_message_that_the_context_ends_says_so() -> None:
    choice = MessagesChoice(HEAD, includes_reasoning=True, ends_at_context=True)
    cut, whole = (choice.final([], last) for last in (Delta(finish_reason="length"), Delta(finish_reason="stop")))
    assert (cut["stop_reason"], whole["stop_reason"]) == ("model_context_window_exceeded", "end_turn")
