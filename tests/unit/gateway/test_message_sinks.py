"""Parsed messages to events of a stream and to one body: `ChoiceStream`, `ChoiceCollector`, and what they render."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from proa.contract import EngineCoreOutput, FinishReason
from proa.text import TextStream
from proa_gateway.apis.chat.render import ChatChoice
from proa_gateway.errors import GatewayError
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.output.text import Delta, EngineSequence, OutputProcessor
from proa_gateway.parsing.events import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
    merged,
)
from proa_gateway.parsing.grammars.message import Reasoning
from proa_gateway.parsing.json_formats import HERMES
from proa_gateway.serving.choices import Choice, ChoiceCollector, ChoiceStream, Prompt, Usage
from proa_gateway.serving.envelope import Envelope
from proa_gateway.serving.message_format import MessageFormat, ModelFormat
from proa_gateway.serving.tools.tool import Tool
from proa_gateway.tokenizer import Tokenizer
from support.asgi import AsgiServer
from support.chat import tool_tokenizer, tool_tokenizer_files
from support.chat_forms import plain_form

EOS = 0
TOOL = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})
TRANSCRIPT = (
    "<think>née 😀</think>\n\nWell.\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"</tool_call"}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>'
)
MESSAGE = {
    "content": "Well.",
    "reasoning_content": "née 😀",
    "calls": [("f", '{"a": "}\\"</tool_call"}'), ("f", "{}")],
    "finish_reason": "tool_calls",
}


@cache
def tokenizer() -> Tokenizer:
    with ThreadPoolExecutor(1) as executor:
        return Tokenizer(tool_tokenizer_files(), executor)


def message_format(*, parallel_calls: bool = True) -> MessageFormat:
    return ModelFormat(HERMES, tokenizer()).for_request([TOOL], Reasoning.OPTIONAL, parallel_calls=parallel_calls)


@pytest.mark.parametrize(
    ("generation_prompt", "reasoning"),
    [
        ("<|im_start|>assistant\n<think>\n", Reasoning.OPEN),
        ("<|im_start|>assistant\n", Reasoning.OPTIONAL),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Reasoning.CLOSED),
    ],
)
def test_the_generation_prompt_shows_whether_reasoning_is_open(generation_prompt: str, reasoning: Reasoning) -> None:
    assert ModelFormat(HERMES, tokenizer()).reasoning_after(generation_prompt) is reasoning


def choice(**changes: Any) -> ChatChoice:
    envelope = Envelope(id="chatcmpl-1", object="chat.completion.chunk", created=5, model="m")
    return ChatChoice(plain_form(envelope, **{"is_parsed": True} | changes), 0, {})


def collect(*, parallel_calls: bool = True) -> ChoiceCollector:
    return ChoiceCollector(Prompt([], message_format=message_format(parallel_calls=parallel_calls)))


class Listener:
    """Of a sequence whose end and failures are of no interest."""

    def started(self, sequence: EngineSequence) -> None: ...

    def ended(self, sequence: EngineSequence) -> None: ...

    def draining(self, sequence: EngineSequence) -> None: ...

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None: ...


def sequence_of(output: Choice) -> OutputProcessor:
    stream = TextStream(tokenizer().vocabulary)
    markers = message_format().markers if output.consumer is not None else None
    return OutputProcessor(stream, output.consumer or output, Listener(), wants_tokens=False, markers=markers)


def run(sequence: OutputProcessor, token_ids: list[int], *, size: int = 1, resumed_after: int = 0) -> None:
    """Give the tokens as engines send them, `size` at a time, and after `resumed_after` of them as another engine."""
    cuts = sorted({*range(0, len(token_ids), size), resumed_after, len(token_ids)})
    for start, end in pairwise(cuts):
        part = token_ids[start:end]
        if len(part) == 1 and start not in (0, resumed_after):
            sequence.token(part[0])
        else:
            sequence.output(EngineCoreOutput(new_token_ids=part))
    sequence.output(EngineCoreOutput(new_token_ids=[EOS], finish_reason=FinishReason.STOP))


async def make_stream(server: AsgiServer, *, interval: int = 1, **changes: Any) -> tuple[ChoiceStream, ResponseWriter]:
    writer = ResponseWriter(server.send, server)
    await writer.start_events()
    stream = ChoiceStream(message_format(), choice(**changes), writer, interval=interval, on_blocked=lambda: None)
    writer.write(stream.renderer.opening(Usage(1, 0, 0)))
    return stream, writer


def assembled(server: AsgiServer) -> dict[str, Any]:
    """What the official client makes of the events."""
    state: Any = ChatCompletionStreamState()
    for event in server.events():
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    return simplified(state.get_final_completion().choices[0].to_dict())


def simplified(rendered: dict[str, Any]) -> dict[str, Any]:
    message = rendered["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return {
        "content": message["content"],
        "reasoning_content": message["reasoning_content"],
        "calls": calls,
        "finish_reason": rendered["finish_reason"],
    }


IDS = tool_tokenizer().encode(TRANSCRIPT).ids


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("interval", [1, 4])
async def test_the_client_assembles_the_events_to_the_body(size: int, interval: int) -> None:
    server = AsgiServer()
    stream, _ = await make_stream(server, interval=interval)
    run(sequence_of(stream), IDS, size=size)
    assert assembled(server) == MESSAGE
    collector = collect()
    run(sequence_of(collector), IDS, size=size)
    assert simplified(json.loads(json.dumps(choice().final(collector.output())))) == MESSAGE


async def test_a_message_continues_from_another_engine_after_any_token() -> None:
    for position in range(1, len(IDS)):
        collector = collect()
        run(sequence_of(collector), IDS, resumed_after=position)
        assert simplified(choice().final(collector.output())) == MESSAGE, position


async def test_events_for_a_slow_client_are_merged_by_kind() -> None:
    server = AsgiServer()
    stream, writer = await make_stream(server)
    server.stop_reading()
    run(sequence_of(stream), IDS)
    assert writer.blocked
    num_sent = len(server.sent)
    server.start_reading()
    await writer.drain()
    stream.flush()
    assert len(server.sent) == num_sent + 1
    deltas = [event["choices"][0]["delta"] for event in server.events()]
    kinds = [next(iter(delta), None) for delta in deltas[1:]]
    assert kinds == ["reasoning_content", "content", *["tool_calls"] * 4]
    assert assembled(server) == MESSAGE


def test_neighbours_of_one_kind_are_merged_and_others_are_not() -> None:
    started, ended = CallStarted(0, "id", "f"), CallEnded(0)
    events: list[MessageEvent] = [
        ReasoningDelta("a"),
        ReasoningDelta("b"),
        ContentDelta("c"),
        started,
        ArgumentsDelta(0, "{"),
        ArgumentsDelta(0, "}"),
        ended,
    ]
    events += [ArgumentsDelta(1, "{"), ContentDelta("d"), ContentDelta("e")]
    assert merged(events) == [
        ReasoningDelta("ab"),
        ContentDelta("c"),
        started,
        ArgumentsDelta(0, "{}"),
        ended,
        ArgumentsDelta(1, "{"),
        ContentDelta("de"),
    ]


async def test_reasoning_that_is_not_included_makes_no_events() -> None:
    server = AsgiServer()
    stream, _ = await make_stream(server, includes_reasoning=False)
    stream.events([ReasoningDelta("Hm")], Delta())
    assert len(server.sent) == 1
    stream.events([], Delta(finish_reason="stop"))
    assert server.events()[-1]["choices"][0]["delta"] == {}


def test_without_parallel_calls_the_rest_is_dropped() -> None:
    collector = collect(parallel_calls=False)
    run(sequence_of(collector), IDS)
    assert simplified(choice().final(collector.output())) == {**MESSAGE, "calls": MESSAGE["calls"][:1]}


def test_tokens_of_reasoning_are_those_between_its_markers() -> None:
    collector = collect()
    sequence = sequence_of(collector)
    run(sequence, IDS)
    assert sequence.reasoning_tokens == len(tool_tokenizer().encode("née 😀").ids)


async def test_an_output_without_a_format_is_content() -> None:
    server = AsgiServer()
    writer = ResponseWriter(server.send, server)
    await writer.start_events()
    stream = ChoiceStream(None, choice(is_parsed=False), writer, on_blocked=lambda: None)
    writer.write(stream.renderer.opening(Usage(1, 0, 0)))
    sequence = sequence_of(stream)
    run(sequence, tool_tokenizer().encode("one two").ids)
    texts = [event["choices"][0]["delta"].get("content") for event in server.events()]
    assert "".join(text or "" for text in texts) == "one two"
    assert (stream.consumer, sequence.reasoning_tokens) == (None, None)
