"""ConstrainedOutput: an output that only repeats a digit ends."""

import pytest

from proa.contract import EngineCoreOutput, FinishReason
from proa.text import TextStream, Vocabulary
from proa_gateway.output.digit_runs import MAX_DIGIT_RUN, WARNING, ConstrainedOutput
from proa_gateway.output.text import Delta, EngineSequence
from support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
(THREE,), (DASH,) = TOKENIZER.encode("3").ids, TOKENIZER.encode("-").ids


class Recorder:
    """A sink and a listener."""

    is_satisfied = False
    reasoning_tokens = None

    def __init__(self) -> None:
        self.shown = ""
        self.last = Delta()
        self.num_ends = 0
        self.warnings: list[str] = []

    def text(self, text: str) -> None:
        self.shown += text

    def delta(self, delta: Delta) -> None:
        self.shown += delta.text
        self.last = delta

    def marker(self, token_id: int) -> None:
        raise AssertionError

    def started(self, sequence: EngineSequence) -> None: ...

    def ended(self, sequence: EngineSequence) -> None:
        self.num_ends += 1

    def draining(self, sequence: EngineSequence) -> None: ...

    def failed(self, *args: object, **fields: object) -> None:
        raise AssertionError


def make(**text: object) -> tuple[ConstrainedOutput, Recorder]:
    recorder = Recorder()
    output = ConstrainedOutput(
        TextStream(VOCABULARY, **text),  # type: ignore[arg-type]
        recorder,
        recorder,
        wants_tokens=False,
        markers=None,
        vocabulary=VOCABULARY,
        warn=recorder.warnings.append,
    )
    return output, recorder


@pytest.mark.parametrize("stop", [(), ("33e",)])
@pytest.mark.parametrize("is_single", [True, False])
def test_a_run_of_digits_ends_the_output_with_length(stop: tuple[str, ...], is_single: bool) -> None:
    output, recorder = make(stop=stop)
    for token_id in TOKENIZER.encode("one").ids:
        output.token(token_id)
    for _ in range(MAX_DIGIT_RUN - 1):
        output.token(THREE)
    assert recorder.num_ends == 0
    if is_single:
        output.token(THREE)
    else:
        output.output(EngineCoreOutput(request_id="r", new_token_ids=[THREE]))
    assert (recorder.num_ends, recorder.warnings) == (1, [WARNING])
    assert (recorder.last.finish_reason, recorder.last.stop_reason) == ("length", "repetition_detected")
    assert recorder.shown == "one" + "3" * MAX_DIGIT_RUN
    assert output.num_tokens == len(output.received)


def test_other_runs_and_shorter_ones_do_not() -> None:
    output, recorder = make()
    for token_id in [DASH] * 200 + ([THREE] * (MAX_DIGIT_RUN - 1) + [DASH]) * 3:
        output.token(token_id)
    assert recorder.num_ends == 0


def test_an_output_that_has_ended_is_not_ended_again() -> None:
    output, recorder = make()
    last = EngineCoreOutput(request_id="r", new_token_ids=[THREE] * MAX_DIGIT_RUN, finish_reason=FinishReason.COMPLETE)
    output.output(last)
    assert (recorder.num_ends, recorder.last.finish_reason, recorder.warnings) == (1, "stop", [])
