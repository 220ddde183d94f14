"""ConstrainedOutput: the output of a request with a grammar, which ends when it only repeats a digit.

Numbers in JSON have no end, and a model that repeats the token `0` or `3` may do so until `max_tokens`. The engine's
repetition detection counts any token, such as one of dashes in a string, and with it an engine samples the tokens that
a grammar forces one by one. So the gateway counts.
"""

from collections.abc import Callable

from proa.contract import EngineCoreOutput, FinishReason
from proa.text import TextStream, Vocabulary
from proa_gateway.output.text import DeltaSink, OutputProcessor, SequenceListener

MAX_DIGIT_RUN = 60  # tokens; a float has 17 digits that mean something
STOP_REASON = "repetition_detected"  # as of the engine's repetition detection
WARNING = f"the output was ended after the same digits {MAX_DIGIT_RUN} times in a row"


class ConstrainedOutput(OutputProcessor):
    """Ends with `length` when the last tokens are one token of digits, `MAX_DIGIT_RUN` times, and calls `warn`."""

    __slots__ = ("_run", "_run_token_id", "_vocabulary", "_warn")

    def __init__(
        self,
        stream: TextStream | None,
        sink: DeltaSink,
        listener: SequenceListener,
        *,
        wants_tokens: bool,
        markers: frozenset[int] | None,
        vocabulary: Vocabulary,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(stream, sink, listener, wants_tokens=wants_tokens, markers=markers)
        self._vocabulary = vocabulary
        self._warn = warn
        self._run_token_id = -1  # the last token
        self._run = 0  # how often it came in a row

    def token(self, token_id: int) -> None:
        super().token(token_id)
        self._count(token_id)
        self._end_run()

    def output(self, output: EngineCoreOutput) -> None:
        super().output(output)
        for token_id in output.new_token_ids:
            self._count(token_id)
        self._end_run()

    def _count(self, token_id: int) -> None:
        self._run = self._run + 1 if token_id == self._run_token_id else 1
        self._run_token_id = token_id

    def _end_run(self) -> None:
        if self._run < MAX_DIGIT_RUN or self.finish_reason is not None:
            return
        if not self._vocabulary.token_bytes(self._run_token_id).isdigit():
            self._run = 0
            return
        self._warn(WARNING)
        self.cut(FinishReason.LENGTH, STOP_REASON)
