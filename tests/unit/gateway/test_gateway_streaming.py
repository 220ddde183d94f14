"""From deltas to events: the short way says what the long way says, and a slow client gets fewer, larger events."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from proa.text import Vocabulary
from proa_gateway.openai.consumers import ChoiceStream, Collector
from proa_gateway.openai.rendering import ChatChoice, CompletionChoice, Envelope, Prompt, Usage
from proa_gateway.openai.sse import EventWriter
from proa_gateway.output_processor import Delta
from support.tokenizers import byte_level_tokenizer

VOCABULARY = Vocabulary(byte_level_tokenizer())
AWKWARD = ["plain", ' "quoted" \\ and \n\t', "naïve 😀", "\u2028</script>", "\x00\x1f"]


class Socket:
    """An ASGI server's `send`, whose client may stop taking anything."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, message: Message) -> None:
        await self.open.wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])

    def events(self) -> list[Any]:
        parts = b"".join(self.sent).split(b"\n\n")
        return [json.loads(part.removeprefix(b"data: ")) for part in parts if part]


def envelope(**changes: Any) -> Envelope:
    fields: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": 'a "b"'}
    return Envelope(**{**fields, **changes})


def chat_choice(**changes: Any) -> ChatChoice:
    return ChatChoice(envelope(**changes), 3, VOCABULARY, logprobs=False, token_ids=False)


def completion_choice(echo: Prompt | None = None) -> CompletionChoice:
    return CompletionChoice(
        envelope(), 3, VOCABULARY, logprobs=False, token_ids=False, skip_special_tokens=True, echo=echo
    )


async def started(socket: Socket) -> EventWriter:
    events = EventWriter(socket.send, socket.send, lambda: None, patience=5)
    await events.start()
    return events


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("include_usage", [False, True])
def test_the_short_way_to_an_event_says_what_the_long_way_says(text: str, include_usage: bool) -> None:
    for choice in (chat_choice(include_usage=include_usage), completion_choice()):
        short = choice.text_head + json.dumps(text).encode() + choice.text_tail
        assert json.loads(short.removeprefix(b"data: ")) == json.loads(choice.event(Delta(text))[6:])
        assert short.endswith(b"\n\n")


async def test_texts_are_sent_as_they_come() -> None:
    socket = Socket()
    stream = ChoiceStream(chat_choice(), await started(socket), interval=1, wake=lambda: None)
    for text in AWKWARD:
        stream.text(text)
    stream.delta(Delta("end", finish_reason="stop"))
    events = socket.events()
    assert [event["choices"][0]["delta"]["content"] for event in events] == [*AWKWARD, "end"]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_slow_client_gets_what_it_missed_in_one_event() -> None:
    socket = Socket()
    events = await started(socket)
    stream = ChoiceStream(chat_choice(), events, interval=1, wake=lambda: None)
    stream.text("a")
    socket.open.clear()
    for number in range(1000):
        stream.text(f"{number},")
    stream.delta(Delta("end", finish_reason="length"))
    assert events.blocked
    assert len(socket.sent) == 1
    socket.open.set()
    await events.drain()
    stream.flush()
    texts = [event["choices"][0]["delta"]["content"] for event in socket.events()]
    assert texts == ["a", "0,", "".join(f"{number}," for number in range(1, 1000)) + "end"]


async def test_a_client_that_takes_nothing_is_given_up_after_its_time() -> None:
    socket = Socket()
    events = EventWriter(socket.send, socket.send, lambda: None, patience=0.05)
    await events.start()
    socket.open.clear()
    events.write(b"x")
    with pytest.raises(TimeoutError):
        await events.drain()


async def test_whoever_waits_is_woken_when_a_write_blocks() -> None:
    socket, woken = Socket(), []
    events = EventWriter(socket.send, socket.send, lambda: woken.append(1), patience=5)
    await events.start()
    events.write(b"a")
    assert woken == []
    socket.open.clear()
    events.write(b"b")
    assert woken == [1]
    socket.open.set()
    await events.end(b"c")
    assert socket.sent == [b"a", b"b", b"c"]


async def test_an_interval_merges_all_but_the_first_and_the_last() -> None:
    socket = Socket()
    stream = ChoiceStream(chat_choice(), await started(socket), interval=3, wake=lambda: None)
    for text in "abcdefgh":
        stream.text(text)
    stream.delta(Delta("i", finish_reason="stop"))
    texts = [event["choices"][0]["delta"]["content"] for event in socket.events()]
    assert texts == ["a", "bcd", "efg", "hi"]


async def test_echo_is_the_beginning_of_the_first_event() -> None:
    socket = Socket()
    choice = completion_choice(echo=Prompt([5], "Once"))
    stream = ChoiceStream(choice, await started(socket), interval=1, wake=lambda: None)
    for text in (" upon", " a time"):
        stream.text(text)
    assert [event["choices"][0]["text"] for event in socket.events()] == ["Once upon", " a time"]


async def test_echo_waits_for_the_first_token_which_brings_its_logprobs() -> None:
    socket = Socket()
    stream = ChoiceStream(completion_choice(Prompt([5], "Once")), await started(socket), interval=1, wake=lambda: None)
    stream.flush()
    assert socket.events() == []
    stream.text(" upon")
    assert [event["choices"][0]["text"] for event in socket.events()] == ["Once upon"]


def test_usage_is_its_own_event_without_choices() -> None:
    event = json.loads(envelope(include_usage=True).usage_event(Usage(3, 4, 2))[6:])
    assert event["choices"] == []
    assert event["usage"]["total_tokens"] == 7
    assert event["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_collector_gives_everything_as_one_delta() -> None:
    collector = Collector()
    collector.text("a")
    collector.delta(Delta("b", token_ids=[1]))
    collector.delta(Delta("c", token_ids=[2], finish_reason="stop", stop_reason="x"))
    assert collector.result() == Delta("abc", token_ids=[1, 2], finish_reason="stop", stop_reason="x")
