"""OutputProcessor: a sequence's tokens to the deltas that its sink receives, and when it ends."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from proa.contract import EngineCoreOutput, FinishReason, TokenLogprobs
from proa.text import TextStream, Vocabulary
from proa_gateway.errors import GatewayError, InternalError
from proa_gateway.output.logprob_columns import LogprobColumns
from proa_gateway.output.text import Delta, EngineSequence, OutputProcessor
from support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
EOS = 0


@dataclass
class Recorder:
    """A sink and a listener."""

    texts: list[str] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    message: list[str | int] = field(default_factory=list)  # texts and markers, in their order
    satisfied_after: str | int | None = None  # one of these

    reasoning_tokens = None

    @property
    def is_satisfied(self) -> bool:
        return self.satisfied_after in self.message

    def text(self, text: str) -> None:
        self.texts.append(text)

    def delta(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.texts.append(delta.text)
        self.message.append(delta.text)

    def marker(self, token_id: int) -> None:
        self.message.append(token_id)

    def started(self, sequence: EngineSequence) -> None:
        self.events.append("started")

    def ended(self, sequence: EngineSequence) -> None:
        self.events.append("ended")

    def draining(self, sequence: EngineSequence) -> None:
        self.events.append("draining")

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None:
        self.events.append(f"failed {type(error).__name__} {retryable}")


def make_discarding() -> tuple[OutputProcessor, Recorder]:
    recorder = Recorder()
    return OutputProcessor(None, recorder, recorder, wants_tokens=True), recorder


def make(wants_tokens: bool = False, **text: Any) -> tuple[OutputProcessor, Recorder]:
    recorder = Recorder()
    return OutputProcessor(TextStream(VOCABULARY, **text), recorder, recorder, wants_tokens=wants_tokens), recorder


MARKER = 300


def make_parsed(wants_tokens: bool = False, **text: Any) -> tuple[OutputProcessor, Recorder]:
    recorder = Recorder()
    stream = TextStream(VOCABULARY, **text)
    markers = frozenset({MARKER})
    return OutputProcessor(stream, recorder, recorder, wants_tokens=wants_tokens, markers=markers), recorder


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def logprobs(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids]


def test_each_plain_token_becomes_text_at_once() -> None:
    sequence, recorder = make()
    for token_id in ids("The quick brown"):
        sequence.token(token_id)
    assert recorder.texts == ["The", " quick", " brown"]
    assert recorder.deltas == []
    assert recorder.events == ["started"]
    assert sequence.num_tokens == 3


def test_a_character_split_over_tokens_is_emitted_whole() -> None:
    sequence, recorder = make()
    for token_id in ids("👩‍👩‍👧 €"):
        sequence.token(token_id)
    assert "".join(recorder.texts) == "👩‍👩‍👧 €"
    assert "�" not in "".join(recorder.texts)
    assert sequence.num_tokens == len(sequence.received) == len(ids("👩‍👩‍👧 €"))


def test_the_end_token_counts_and_adds_no_text() -> None:
    sequence, recorder = make()
    sequence.token(ids("The")[0])
    sequence.output(EngineCoreOutput(new_token_ids=[EOS], finish_reason=FinishReason.STOP))
    assert "".join(recorder.texts) == "The"
    assert (recorder.deltas[-1].finish_reason, recorder.deltas[-1].stop_reason) == ("stop", None)
    assert sequence.num_tokens == 2
    assert recorder.events == ["started", "ended"]


def test_the_last_token_of_a_complete_output_is_part_of_the_text() -> None:
    sequence, recorder = make()
    all_ids = ids("one two")
    sequence.output(EngineCoreOutput(new_token_ids=all_ids, finish_reason=FinishReason.COMPLETE))
    assert "".join(recorder.texts) == "one two"
    assert (recorder.deltas[-1].finish_reason, recorder.deltas[-1].stop_reason) == ("stop", None)
    assert sequence.num_tokens == len(all_ids)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_cuts_text_tokens_and_logprobs_alike(size: int) -> None:
    all_ids = ids("one two three four five six")
    sequence, recorder = make(wants_tokens=True, stop=[" four"])
    for start in range(0, len(all_ids), size):
        if "ended" not in recorder.events:
            chunk = all_ids[start : start + size]
            sequence.output(EngineCoreOutput(new_token_ids=chunk, logprobs=logprobs(chunk)))
    assert "".join(recorder.texts) == "one two three"
    kept = [token_id for delta in recorder.deltas for token_id in delta.token_ids]
    assert kept == [entry.token_id for delta in recorder.deltas for entry in delta.logprobs] == ids("one two three")
    assert sequence.num_tokens == len(kept)
    assert (recorder.deltas[-1].finish_reason, recorder.deltas[-1].stop_reason) == ("stop", " four")
    assert recorder.events == ["started", "ended"]


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    sequence, recorder = make(stop=["two five"])
    for token_id in ids("one two"):
        sequence.token(token_id)
    assert "".join(recorder.texts) == "one "
    sequence.token(ids(" three")[0])
    assert "".join(recorder.texts).startswith("one two")
    sequence.output(EngineCoreOutput(finish_reason=FinishReason.LENGTH))
    assert recorder.deltas[-1].finish_reason == "length"


def test_tokens_and_logprobs_come_with_their_text() -> None:
    sequence, recorder = make(wants_tokens=True, stop=["xyz"])
    chunk = ids("one")
    sequence.output(EngineCoreOutput(new_token_ids=chunk, logprobs=logprobs(chunk)))
    assert [len(delta.token_ids) for delta in recorder.deltas] == [len(chunk)]


def test_prompt_logprobs_come_with_the_first_delta() -> None:
    sequence, recorder = make(wants_tokens=True)
    for token_id in (5, 6):  # a chunk of prefill each
        sequence.output(EngineCoreOutput(prompt_logprobs=logprobs([token_id])))
    assert recorder.events == []
    chunk = ids("one")[:1]
    for _ in range(2):
        sequence.output(EngineCoreOutput(new_token_ids=chunk, logprobs=logprobs(chunk)))
    assert [len(delta.prompt_logprobs) for delta in recorder.deltas] == [2, 0]


def test_an_error_of_the_request_is_a_failure_that_is_not_retried() -> None:
    sequence, recorder = make()
    sequence.output(EngineCoreOutput(finish_reason=FinishReason.ERROR, error="too complex"))
    assert recorder.events == ["failed GrammarFailed False"]


def test_a_sequence_continues_on_another_engine_where_it_stopped() -> None:
    sequence, recorder = make()
    whole = ids("A 👩‍👩‍👧 costs €5.")
    cut = len(ids("A 👩")) - 1  # in the middle of a character
    sequence.output(EngineCoreOutput(new_token_ids=whole[:cut], num_cached_tokens=16))
    sequence.failed(InternalError("lost"), retryable=True)
    assert list(sequence.received) == whole[:cut]
    sequence.output(EngineCoreOutput(new_token_ids=whole[cut : cut + 1], num_cached_tokens=48))
    for token_id in whole[cut + 1 :]:
        sequence.token(token_id)
    sequence.output(EngineCoreOutput(finish_reason=FinishReason.LENGTH, num_cached_tokens=48))
    assert "".join(recorder.texts) == "A 👩‍👩‍👧 costs €5."
    assert recorder.events == ["started", "failed InternalError True", "ended"]
    assert (sequence.num_tokens, sequence.num_cached_tokens) == (len(whole), 16)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.COMPLETE])
def test_a_discarded_output_has_prompt_logprobs_and_finish_reason_length(reason: FinishReason) -> None:
    sequence, recorder = make_discarding()
    sequence.output(EngineCoreOutput(prompt_logprobs=logprobs([1, 2])))
    stop_reason = 5 if reason is FinishReason.STOP else None
    last = EngineCoreOutput(new_token_ids=[5], logprobs=logprobs([5]), finish_reason=reason, stop_reason=stop_reason)
    sequence.output(last)
    assert recorder.deltas == [Delta(prompt_logprobs=LogprobColumns(logprobs([1, 2])), finish_reason="length")]
    assert recorder.events == ["started", "ended"]
    assert sequence.num_tokens == 0
    assert list(sequence.received) == [5]


def test_a_discarded_plain_token_does_not_count() -> None:
    sequence, recorder = make_discarding()
    sequence.token(5)
    sequence.output(EngineCoreOutput(finish_reason=FinishReason.LENGTH))
    assert recorder.deltas == [Delta(finish_reason="length")]
    assert sequence.num_tokens == 0


def test_prompt_logprobs_of_an_attempt_without_tokens_are_dropped() -> None:
    sequence, recorder = make(wants_tokens=True)
    sequence.output(EngineCoreOutput(prompt_logprobs=logprobs([1, 2])))
    sequence.failed(InternalError("lost"), retryable=True)
    chunk = ids("one")[:1]
    sequence.output(
        EngineCoreOutput(new_token_ids=chunk, logprobs=logprobs(chunk), prompt_logprobs=logprobs([1, 2, 3]))
    )
    assert [entry.token_id for entry in recorder.deltas[0].prompt_logprobs] == [1, 2, 3]


def push(sequence: OutputProcessor, token_ids: list[int], num_in_call: int) -> None:
    """`num_in_call` 0: with `token`, else with `output`."""
    if not num_in_call:
        for token_id in token_ids:
            sequence.token(token_id)
    for start in range(0, len(token_ids), num_in_call) if num_in_call else ():
        sequence.output(EngineCoreOutput(new_token_ids=token_ids[start : start + num_in_call]))


@pytest.mark.parametrize("num_in_call", [0, 1, 2, 3, 100])
def test_a_marker_comes_as_its_id_between_the_texts(num_in_call: int) -> None:
    sequence, recorder = make_parsed(stop=["never"])
    before, after = ids("one two n"), ids("ever three")
    push(sequence, [MARKER, *before, MARKER, MARKER, *after], num_in_call)
    sequence.output(EngineCoreOutput(new_token_ids=[EOS], finish_reason=FinishReason.STOP))
    at = [position for position, part in enumerate(recorder.message) if part == MARKER]
    texts = [
        "".join(map(str, recorder.message[start + 1 : end])) for start, end in zip(at, [*at[1:], None], strict=True)
    ]
    assert texts == ["one two n", "", "ever three"]
    assert sequence.num_tokens == len(sequence.received)
    assert sum(delta.num_tokens for delta in recorder.deltas) == len(sequence.received) - 3


def test_an_incomplete_character_ends_at_a_marker() -> None:
    sequence, recorder = make_parsed()
    for token_id in [*ids("€")[:1], MARKER, *ids("a")]:
        sequence.token(token_id)
    assert [part for part in recorder.message if part] == ["\ufffd", MARKER, "a"]


def test_a_marker_s_id_and_log_probability_come_with_the_next_delta() -> None:
    sequence, recorder = make_parsed(wants_tokens=True)
    tokens = [*ids("a"), MARKER, *ids("b"), MARKER]
    for number, token_id in enumerate(tokens):
        finish = FinishReason.LENGTH if number == 3 else None
        sequence.output(EngineCoreOutput(new_token_ids=[token_id], logprobs=logprobs([token_id]), finish_reason=finish))
    assert [delta.token_ids for delta in recorder.deltas] == [tokens[:1], tokens[1:3], tokens[3:]]
    assert [[entry.token_id for entry in delta.logprobs] for delta in recorder.deltas] == [
        delta.token_ids for delta in recorder.deltas
    ]
    assert recorder.deltas[-1].finish_reason == "length"


def test_markers_after_a_stop_string_are_not_given() -> None:
    sequence, recorder = make_parsed(stop=["two"])
    sequence.output(EngineCoreOutput(new_token_ids=[*ids("one two"), MARKER, *ids("three"), MARKER]))
    assert recorder.message == ["one "]
    assert recorder.events == ["started", "ended"]


@pytest.mark.parametrize("satisfied_after", ["one two", MARKER])
@pytest.mark.parametrize("as_output", [True, False])
def test_a_parsed_sequence_ends_when_its_sink_is_satisfied(as_output: bool, satisfied_after: str | int) -> None:
    sequence, recorder = make_parsed(wants_tokens=as_output)
    recorder.satisfied_after = satisfied_after
    tokens = [*ids("one two"), MARKER, *ids(" three"), MARKER]
    if as_output:
        sequence.output(EngineCoreOutput(new_token_ids=tokens, logprobs=logprobs(tokens)))
    else:
        recorder.satisfied_after = " two" if satisfied_after != MARKER else MARKER
        for token_id in tokens:
            if sequence.finish_reason is None:
                sequence.token(token_id)
    num_tokens = len(ids("one two")) + (satisfied_after == MARKER)
    assert (recorder.deltas[-1].finish_reason, recorder.deltas[-1].stop_reason) == ("stop", None)
    assert recorder.events == ["started", "ended"]
    assert sequence.num_tokens == num_tokens
    assert [id for delta in recorder.deltas for id in delta.token_ids] == (tokens[:num_tokens] if as_output else [])
    assert " three" not in "".join(recorder.texts)
