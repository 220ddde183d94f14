"""MessageConsumer: events of an output, the tokens of its reasoning, and what is passed on without events."""

from collections.abc import Sequence

from proa.contract import TokenLogprobs
from proa_gateway.output.text import Delta
from proa_gateway.parsing.compiled_format import compile_format
from proa_gateway.parsing.events import CallEnded, ContentDelta, MessageEvent, ReasoningDelta
from proa_gateway.parsing.json_formats import HERMES
from proa_gateway.parsing.parser import MessageConsumer, ResponseParser
from support.messages import Message, MessageCollector

TOKENS = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4}
COMPILED = compile_format(HERMES, TOKENS, calls=True)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[list[MessageEvent], Delta]] = []

    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        self.calls.append((list(events), delta))


def consumer(
    sink: Recorder | MessageCollector, *, reasoning_open: bool = False, parallel_calls: bool = True
) -> MessageConsumer:
    parser = ResponseParser(COMPILED, {}, reasoning_open=reasoning_open)
    return MessageConsumer(parser, sink, parallel_calls=parallel_calls)


def test_reasoning_tokens_are_those_between_the_markers() -> None:
    output = consumer(Recorder())
    output.delta(Delta("\n", num_tokens=1))
    output.marker(1)
    output.delta(Delta("Hm, 1", num_tokens=3))
    output.delta(Delta("", num_tokens=2))
    output.marker(2)
    output.delta(Delta("\n\nYes", num_tokens=2))
    output.delta(Delta(finish_reason="stop"))
    assert output.reasoning_tokens == 5


def test_reasoning_that_the_prompt_opened_counts_from_the_first_token() -> None:
    output = consumer(Recorder(), reasoning_open=True)
    output.delta(Delta("Hm", num_tokens=2))
    output.delta(Delta(num_tokens=1, finish_reason="length"))
    assert output.reasoning_tokens == 3


def test_each_text_is_passed_on_at_once() -> None:
    sink = Recorder()
    output = consumer(sink)
    for text in ("a", " b", "\n"):
        output.text(text)
    assert [events for events, _ in sink.calls] == [[ContentDelta("a")], [ContentDelta(" b")]]
    output.delta(Delta(finish_reason="stop"))
    assert sink.calls[-1][0] == [ContentDelta("\n")]


def test_a_delta_without_events_is_passed_on_for_its_tokens() -> None:
    sink = Recorder()
    output = consumer(sink)
    held = Delta(" ", token_ids=[7], logprobs=[TokenLogprobs(7, 0.0, 1)], num_tokens=1)
    output.delta(held)
    output.delta(Delta("", num_tokens=1))
    assert sink.calls == [([], held)]


def test_without_parallel_calls_the_end_of_the_first_satisfies() -> None:
    sink = Recorder()
    output = consumer(sink, parallel_calls=False)
    output.marker(3)
    output.text('{"name": "f", "arguments": {"a": 1}')
    assert not output.is_satisfied
    output.text('}</tool_call> and <tool_call>{"name": "g"')
    assert output.is_satisfied
    output.delta(Delta(finish_reason="stop"))
    assert [event for events, _ in sink.calls for event in events][-1] == CallEnded(0)


def test_what_looks_like_a_call_is_no_call_and_does_not_satisfy() -> None:
    sink = Recorder()
    output = consumer(sink, parallel_calls=False)
    output.marker(3)
    output.delta(Delta("no", finish_reason="stop"))
    assert not output.is_satisfied
    assert sink.calls[-1][0] == [ContentDelta("<tool_call>no")]


def test_collector_has_the_message_and_all_tokens() -> None:
    collector = MessageCollector()
    output = consumer(collector)
    output.marker(1)
    output.delta(Delta("a", token_ids=[1, 10], num_tokens=1))
    output.marker(2)
    output.delta(Delta("b", token_ids=[2, 11], num_tokens=1, finish_reason="stop", stop_reason="x"))
    assert collector.message == Message("a", "b", ())
    assert collector.delta.token_ids == [1, 10, 2, 11]
    assert (collector.delta.finish_reason, collector.delta.stop_reason) == ("stop", "x")


def test_parts_of_the_same_kind_in_one_delta_are_one_event() -> None:
    parser = ResponseParser(compile_format(HERMES, {}, calls=True), {}, reasoning_open=False)
    assert parser.text("<think>a</think></think>b</think>c") == [ReasoningDelta("a"), ContentDelta("bc")]
