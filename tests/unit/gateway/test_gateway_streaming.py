"""Plain outputs to events and to one body: `ChoiceStream`, `ChoiceCollector`, and what they render."""

import json
from typing import Any

import pytest

from proa.text import Vocabulary
from proa_gateway.apis.chat.render import ChatChoice
from proa_gateway.apis.completions.protocol import CompletionRequest
from proa_gateway.apis.completions.render import CompletionForm, TextChoice
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import ContentDelta
from proa_gateway.serving.choices import ChoiceCollector, ChoiceRenderer, ChoiceStream, Output, Prompt, Usage
from proa_gateway.serving.envelope import Envelope
from support.asgi import AsgiServer
from support.chat_forms import plain_form
from support.tokenizers import byte_level_tokenizer

VOCABULARY = Vocabulary(byte_level_tokenizer())
AWKWARD = ["plain", ' "quoted" \\ and \n\t', "naïve 😀", "\u2028</script>", "\x00\x1f"]


def envelope(**changes: Any) -> Envelope:
    fields: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": 'a "b"'}
    return Envelope(**{**fields, **changes})


def chat_choice(**changes: Any) -> ChatChoice:
    return ChatChoice(plain_form(envelope(**changes)), 3, {})


def completion_choice(echo: str | None = None) -> TextChoice:
    body = CompletionRequest.model_validate({"prompt": "", "echo": echo is not None})
    return TextChoice(CompletionForm(body, VOCABULARY, None, envelope()), 3, Prompt([5], echo))


async def make_writer(server: AsgiServer) -> ResponseWriter:
    writer = ResponseWriter(server.send, server)
    await writer.start_events()
    return writer


async def make_stream(server: AsgiServer, choice: ChoiceRenderer | None = None, *, interval: int = 1) -> ChoiceStream:
    writer = await make_writer(server)
    return ChoiceStream(None, choice or chat_choice(), writer, interval=interval, on_blocked=lambda: None)


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("include_usage", [False, True])
def test_text_head_and_tail_make_the_same_event_as_the_general_path(text: str, include_usage: bool) -> None:
    for choice in (chat_choice(include_usage=include_usage), completion_choice()):
        assert choice.text_frame is not None
        head, tail = choice.text_frame
        short = head + json.dumps(text).encode() + tail
        whole = choice.event([ContentDelta(text)], Delta(), None)
        assert json.loads(short.removeprefix(b"data: ")) == json.loads(whole[6:])
        assert short.endswith(b"\n\n")


async def test_each_text_is_an_event() -> None:
    server = AsgiServer()
    stream = await make_stream(server)
    for text in AWKWARD:
        stream.text(text)
    stream.delta(Delta("end", finish_reason="stop"))
    events = server.events()
    assert [event["choices"][0]["delta"]["content"] for event in events] == [*AWKWARD, "end"]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_deltas_for_a_slow_client_are_merged_into_one_event() -> None:
    server = AsgiServer()
    writer = await make_writer(server)
    stream = ChoiceStream(None, chat_choice(), writer, on_blocked=lambda: None)
    stream.text("a")
    server.stop_reading()
    for number in range(1000):
        stream.text(f"{number},")
    stream.delta(Delta("end", finish_reason="length"))
    assert writer.blocked
    assert len(server.sent) == 1
    server.start_reading()
    await writer.drain()
    stream.flush()
    texts = [event["choices"][0]["delta"]["content"] for event in server.events()]
    assert texts == ["a", "".join(f"{number}," for number in range(1000)) + "end"]


async def test_an_interval_merges_all_but_the_first_and_the_last_delta() -> None:
    server = AsgiServer()
    stream = await make_stream(server, interval=3)
    for text in "abcdefgh":
        stream.text(text)
    stream.delta(Delta("i", finish_reason="stop"))
    texts = [event["choices"][0]["delta"]["content"] for event in server.events()]
    assert texts == ["a", "bcd", "efg", "hi"]


async def test_the_first_event_begins_with_the_echoed_prompt() -> None:
    server = AsgiServer()
    stream = await make_stream(server, completion_choice("Once"))
    for text in (" upon", " a time"):
        stream.text(text)
    assert [event["choices"][0]["text"] for event in server.events()] == ["Once upon", " a time"]


async def test_an_echoed_prompt_waits_for_the_first_token_which_brings_its_logprobs() -> None:
    server = AsgiServer()
    stream = await make_stream(server, completion_choice("Once"))
    stream.flush()
    assert server.events() == []
    stream.text(" upon")
    assert [event["choices"][0]["text"] for event in server.events()] == ["Once upon"]


def test_the_last_event_has_the_usage_and_no_choices() -> None:
    usage, done = envelope(include_usage=True).last_events(Usage(3, 4, 2)).split(b"\n\n", 1)
    event = json.loads(usage[6:])
    assert event["choices"] == []
    assert event["usage"]["total_tokens"] == 7
    assert event["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert done == b"data: [DONE]\n\n"
    assert envelope().last_events(Usage(3, 4, 2)) == done


def test_a_collector_merges_everything_into_one_output() -> None:
    prompt = Prompt([5])
    collector = ChoiceCollector(prompt)
    collector.text("a")
    collector.delta(Delta("b", token_ids=[1]))
    collector.delta(Delta("c", token_ids=[2], finish_reason="stop", stop_reason="x"))
    rest = Delta(token_ids=[1, 2], finish_reason="stop", stop_reason="x")
    assert collector.output() == Output(prompt, [ContentDelta("abc")], rest)
