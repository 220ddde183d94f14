"""Transcripts: what models wrote, and the messages that it is. Each is replayed in deltas of every size."""

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

from tokenizers import AddedToken, Tokenizer

from proa.contract import EngineCoreOutput, FinishReason
from proa.text import TextStream, Vocabulary
from proa_gateway.errors import GatewayError
from proa_gateway.output.text import Delta, EngineSequence, OutputProcessor
from proa_gateway.parsing.compiled_format import CompiledFormat, compile_format
from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.parser import MessageConsumer, ResponseParser
from support.messages import Message, MessageCollector
from support.thorough import THOROUGH
from support.tokenizers import byte_level_tokenizer

PLAIN = "\0"  # inside a token's spelling: the model spelled it in other tokens
SIZES = (1, 2, 3, 5, 1_000_000)  # tokens a delta
MAX_CUTS = 100  # of a text, unless tests are thorough


@dataclass(frozen=True)
class Transcript:
    """`text`: tokens are spelled. `calls`: names, with arguments as a JSON value, or as text if they are truncated.
    `tools`: schemas of parameters. `has_calls`: whether the request has tools at all."""

    text: str
    reasoning: str = ""
    content: str = ""
    calls: Sequence[tuple[str, object]] = ()
    reasoning_open: bool = False
    tools: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    has_calls: bool = True


def check_transcript(tool_format: ToolFormat, transcript: Transcript, tokens: Sequence[str] = ()) -> None:
    """`tokens`: those that are added tokens of the tokenizer, so that the parser gets their ids."""
    replay = Replay(tool_format, transcript, tokens)
    expected = (transcript.reasoning, transcript.content, list(transcript.calls))
    for size in SIZES:
        assert replay.in_deltas(size) == expected, f"{size} tokens a delta"
    whole = replay.cut_at(0)
    assert (whole.reasoning, whole.content) == expected[:2]
    positions = range(0, len(transcript.text), _step(len(transcript.text)))
    for position in positions:
        assert without_ids(replay.cut_at(position)) == without_ids(whole), f"cut at {position}"
    list(replay.truncated_at(*positions))


def _step(length: int) -> int:
    """Between places where a text is cut; the time of all cuts is quadratic, and short texts have the same markers."""
    return 1 if THOROUGH else 1 + length // MAX_CUTS


def parse(tool_format: ToolFormat, text: str, tokens: Sequence[str] = (), *, size: int = 1_000_000) -> Message:
    """The message of an output, `size` tokens a delta."""
    return Replay(tool_format, Transcript(text), tokens).message(size)


def without_ids(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.calls]


class Replay:
    def __init__(self, tool_format: ToolFormat, transcript: Transcript, tokens: Sequence[str]) -> None:
        self._transcript = transcript
        self._tokenizer = _tokenizer(tuple(tokens))
        self._added = _added(tuple(tokens))
        self._compiled = _compiled(tool_format, tuple(tokens), has_calls=transcript.has_calls)

    def in_deltas(self, size: int) -> tuple[str, str, list[tuple[str, object]]]:
        """The message in the form in which a transcript has it."""
        message = self.message(size)
        expected = self._transcript.calls
        as_text = [index < len(expected) and isinstance(expected[index][1], str) for index in range(len(message.calls))]
        calls = [
            (call.name, call.arguments if is_text else json.loads(call.arguments))
            for call, is_text in zip(message.calls, as_text, strict=True)
        ]
        return message.reasoning, message.content, calls

    def message(self, size: int) -> Message:
        """The message of the output in tokens, as the engine sends it."""
        ids = [id for part in self._transcript.text.split(PLAIN) for id in self._tokenizer.encode(part).ids]
        collector = MessageCollector()
        parser = self._parser()
        consumer = MessageConsumer(parser, collector)
        stream = TextStream(Vocabulary(self._tokenizer))
        markers = frozenset(self._compiled.markers)
        output = OutputProcessor(stream, consumer, _Listener(), wants_tokens=False, markers=markers)
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            if size == 1:
                output.token(part[0])
            else:
                output.output(EngineCoreOutput(new_token_ids=part))
        output.output(EngineCoreOutput(finish_reason=FinishReason.LENGTH))
        assert parser.num_calls == len(collector.message.calls)
        return collector.message

    def cut_at(self, position: int) -> Message:
        """The message of the output in two parts; the tokens of the format stay whole."""
        return self._parse(_cut(self._runs(), position, self._added))

    def in_pieces(self, size: int) -> Message:
        """The message of the output in pieces of `size` characters; the tokens of the format stay whole."""
        runs = [[run] if run in self._added else _pieces(run, size) for run in self._runs()]
        return self._parse([piece for run in runs for piece in run])

    def truncated_at(self, *positions: int) -> Iterator[Message]:
        """The message of the first part of the output alone, of each length in turn, the shortest first: the same in
        one delta as in one a character."""
        runs = self._runs()
        characters = [part for run in runs for part in ([run] if run in self._added else run)]
        ends = list(accumulate(map(len, characters)))
        reading, num_read = self._begin(), 0
        shared = {id(each): each for each in (self._compiled, self._transcript.tools)}  # is not copied
        for position in positions:
            end = bisect_right(ends, position)
            self._read(reading, characters[num_read:end])
            num_read = end
            whole = self._parse(_beginning(runs, position, self._added))
            copied = _Reading(deepcopy(reading.parser, shared.copy()), reading.collector.copy())
            assert without_ids(copied.finish()) == without_ids(whole), f"truncated at {position}"
            yield whole

    def _runs(self) -> list[str]:
        """The text between the format's tokens, and those."""
        if not self._added:
            return [self._transcript.text.replace(PLAIN, "")]
        pattern = "|".join(map(re.escape, sorted(self._added, key=len, reverse=True)))
        return [run.replace(PLAIN, "") for run in re.split(f"({pattern})", self._transcript.text) if run]

    def _parser(self) -> ResponseParser:
        transcript = self._transcript
        return ResponseParser(self._compiled, transcript.tools, reasoning_open=transcript.reasoning_open)

    def _begin(self) -> "_Reading":
        return _Reading(self._parser(), MessageCollector())

    def _read(self, reading: "_Reading", parts: Iterable[str]) -> None:
        for part in parts:
            token_id = self._added.get(part, -1)
            is_marker = token_id in self._compiled.markers
            events = reading.parser.marker(token_id) if is_marker else reading.parser.text(part)
            reading.collector.events(events, Delta())

    def _parse(self, parts: Iterable[str]) -> Message:
        reading = self._begin()
        self._read(reading, parts)
        return reading.finish()


@dataclass(frozen=True)
class _Reading:
    """An output of which a part has been parsed."""

    parser: ResponseParser
    collector: MessageCollector

    def finish(self) -> Message:
        self.collector.events(self.parser.finish(), Delta())
        return self.collector.message


def _pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def _cut(runs: Sequence[str], position: int, whole: Collection[str]) -> Iterator[str]:
    for run in runs:
        if run not in whole and 0 < position < len(run):
            yield from (run[:position], run[position:])
        else:
            yield run
        position -= len(run)


def _beginning(runs: Sequence[str], length: int, whole: Collection[str]) -> Iterator[str]:
    """The first `length` characters, without a last run of `whole` that is not whole."""
    for run in runs:
        if length <= 0 or (run in whole and len(run) > length):
            return
        yield run[:length]
        length -= len(run)


@cache
def _tokenizer(tokens: tuple[str, ...]) -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    return tokenizer


@cache
def _added(tokens: tuple[str, ...]) -> dict[str, int]:
    """The ids of the added tokens."""
    added = _tokenizer(tokens).get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.content in tokens}


@cache
def _compiled(tool_format: ToolFormat, tokens: tuple[str, ...], *, has_calls: bool) -> CompiledFormat:
    return compile_format(tool_format, _added(tokens), calls=has_calls)


class _Listener:
    def started(self, sequence: EngineSequence) -> None: ...

    def ended(self, sequence: EngineSequence) -> None: ...

    def draining(self, sequence: EngineSequence) -> None: ...

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None:
        raise error
