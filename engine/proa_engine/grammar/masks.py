"""The state of each output under its grammar (`LLGuidanceMatcher`), and the masks of a step's constrained rows.

Masks are filled on the step's thread and a few threads of llguidance (`Masks`).
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from proa_engine.core.grammar import GrammarCursor, GrammarMasks, MaskedSample, Part
from proa_engine.grammar.compiled import CompiledGrammar
from proa_engine.grammar.failures import failure, is_of_lexer
from proa_engine.grammar.stats import GrammarStats
from proa_engine.grammar.tokenizer import GrammarTokenizer

Words = npt.NDArray[np.uint32]  # a mask: bit i % 32 of word i // 32 is set if token i is allowed

WORD = 32  # bits

MAX_SLOW_SECONDS = 0.25  # of one output, beyond what its masks may take

PARALLEL_ROWS = 16  # fewer are filled on the calling thread, in less time than it takes to wake other threads
SAMPLED_ROWS = 4  # of those filled on other threads: so many at least are filled on the calling one, and timed
SLOW_SECONDS, SLOW_SECONDS_PER_ROW = 0.005, 0.0001  # processor time; a fill that takes more may have slow rows
NUM_TIMED_FILLS = 4  # after a slow one
ROW_SECONDS = 0.002  # processor time of one row's mask; what exceeds it is charged to the request

_FIRST, _FREE = Part.FIRST, Part.FREE  # looked up once: in a loop over rows it takes most of the time

_TOO_SLOW = "its masks take too long to compute"

MakeBuffer = Callable[[int], memoryview]  # number of bytes -> writable memory


def num_words(tokenizer: GrammarTokenizer) -> int:
    """The length of a mask, in words."""
    return -(-tokenizer.vocab_size // WORD)


def allow(mask: Words, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        mask[token_id // WORD] |= np.uint32(1 << token_id % WORD)


def forbid(mask: Words, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        mask[token_id // WORD] &= np.uint32(~(1 << token_id % WORD) & 0xFFFFFFFF)


@dataclass(slots=True)
class _Slowness:
    """Of an output's masks, behind its draft tokens too."""

    seconds: float = 0.0

    @property
    def is_too_much(self) -> bool:
        return self.seconds > MAX_SLOW_SECONDS


class LLGuidanceMatcher:
    """`stop_token_ids` are the request's, which end its output as the model's end tokens do. `ignores_end`: the output
    does not end where it may, only where it must.

    A matcher fails for good at a token that is not allowed, at a limit of llguidance, and if its masks take too long.
    llguidance lets a failed output end, and accepts its end token: only the checks here keep it from being complete.
    """

    __slots__ = ("_compiled", "_slowness", "ignores_end", "state", "stop_token_ids")

    def __init__(
        self, compiled: CompiledGrammar, stop_token_ids: Sequence[int] = (), *, ignores_end: bool = False
    ) -> None:
        self._compiled = compiled
        self._slowness = _Slowness()
        self.state = compiled.start()
        self.stop_token_ids = stop_token_ids
        self.ignores_end = ignores_end

    @property
    def is_accepting(self) -> bool:
        return not self._is_failed and self.state.is_accepting()

    @property
    def is_done(self) -> bool:
        return self.state.is_stopped() and not self._is_failed

    def accept(self, token_id: int) -> bool:
        # most often one call instead of two: a failed matcher is stopped too
        if (self._slowness.is_too_much or self.state.is_stopped()) and self._is_failed:
            return self._reject()
        return self.state.consume_token(token_id) or self._reject()

    @property
    def error(self) -> str:
        if self._slowness.is_too_much:
            return _TOO_SLOW
        return failure(self.state)

    def restart(self) -> None:
        self.state = self._compiled.start()

    def copy(self) -> "LLGuidanceMatcher":
        copied = copy(self)  # not `deepcopy`: what it charges is charged to the output
        copied.state = self.state.deep_copy()  # it shares the lexer in spite of the name
        return copied

    def forced(self) -> Sequence[int]:
        tokens: list[int] = self.state.compute_ff_tokens()  # none if it is stopped or failed
        return tokens

    def count_masks(self, seconds: float, number: int = 1) -> None:
        """Count `number` masks, of so much processor time each, for the memory of the grammar."""
        self._compiled.count_masks(seconds, number)

    def charge(self, seconds: float) -> None:
        """Count the time by which computing a mask was too slow."""
        self._slowness.seconds += seconds

    def _reject(self) -> bool:
        if is_of_lexer(self.state.get_error()):
            self._compiled.is_failed = True
        return False

    @property
    def _is_failed(self) -> bool:
        return self._slowness.is_too_much or self.state.is_error()


class Masks:
    """Not thread-safe. `make_buffer` makes the memory of masks, which lives as long as they do."""

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        eos_token_ids: Iterable[int],
        *,
        max_samples: int,
        make_buffer: MakeBuffer,
        num_threads: int,
        stats: GrammarStats,
        max_steps_in_flight: int,
    ) -> None:
        """`max_samples`: of one step. `max_steps_in_flight`: steps whose masks may be read while those of the next one
        are filled."""
        length = num_words(tokenizer)
        buffers = [make_buffer(4 * max_samples * length) for _ in range(max_steps_in_flight + 1)]
        arrays = [np.frombuffer(buffer, np.uint32).reshape(-1, length) for buffer in buffers]
        self._ring = itertools.cycle([(array, array.ctypes.data) for array in arrays])
        self._num_bytes = 4 * length  # of a mask
        self._no_end = np.full(length, 0xFFFFFFFF, np.uint32)
        forbid(self._no_end, eos_token_ids)
        self._end_words = (~self._no_end).nonzero()[0]
        self._end_bits = ~self._no_end[self._end_words]
        self._executor = LLExecutor(num_threads)
        self._num_timed_fills = 0  # fills that are still to time each row alone
        self._num_parallel_fills = 0
        self._stats = stats

    def fill(self, samples: Sequence[MaskedSample]) -> GrammarMasks | None:
        """Implement `core.grammar.Grammars.fill`. A matcher that fails here refuses the row's next token, whatever it
        is."""
        masked = [each for each in samples if _is_masked(each.allowed)]
        if not masked:
            return None
        started = time.perf_counter()
        buffer, address = next(self._ring)
        masks = buffer[: len(masked)]
        bound, ignoring, first = [], [], []
        for index, (_, _, cursor) in enumerate(masked):
            if isinstance(cursor, int):
                masks[index] = 0
                allow(masks[index], (cursor,))
                continue
            matcher = cursor.matcher
            assert isinstance(matcher, LLGuidanceMatcher), "the matcher is of another library"
            if cursor.part is _FREE:
                masks[index] = self._no_end
                forbid(masks[index], matcher.stop_token_ids)
                continue
            bound.append((matcher, index))
            if matcher.ignores_end:
                ignoring.append(index)
            if cursor.part is _FIRST:
                first.append((index, cursor.grammar.free_if_first))
        self._fill_bound(bound, address)
        if ignoring and (masks[:, self._end_words] & self._end_bits).any():
            self._forbid_ends(masks, ignoring)
        for index, token_ids in first:
            allow(masks[index], token_ids)
        self._stats.observe_fill(time.perf_counter() - started)
        rows, places, _ = zip(*masked, strict=True)
        return GrammarMasks(rows, places, masks.view(np.int32).data)

    def _forbid_ends(self, masks: Words, indices: list[int]) -> None:
        """Forbid ends in the masks at these indices that allow something else."""
        for index in indices:
            if (going_on := masks[index] & self._no_end).any():
                masks[index] = going_on

    def _fill_bound(self, rows: list[tuple[LLGuidanceMatcher, int]], address: int) -> None:
        """Compute the masks at these indices of a buffer."""
        started = time.process_time()  # includes the executor's threads; wall time would include waiting for a core
        if self._num_timed_fills:
            self._num_timed_fills -= 1
            for matcher, seconds in _fill_alone(rows, address, self._num_bytes):
                matcher.count_masks(seconds)
                matcher.charge(max(0.0, seconds - ROW_SECONDS))
            return
        if len(rows) < PARALLEL_ROWS:
            for matcher, seconds in _fill_alone(rows, address, self._num_bytes):
                matcher.count_masks(seconds)
        else:
            self._fill_parallel(rows, address)
        if time.process_time() - started > SLOW_SECONDS + SLOW_SECONDS_PER_ROW * len(rows):
            self._num_timed_fills = NUM_TIMED_FILLS

    def _fill_parallel(self, rows: list[tuple[LLGuidanceMatcher, int]], address: int) -> None:
        """Compute the masks on several threads, but for a sample that stands for all rows, others each time."""
        distance = len(rows) // SAMPLED_ROWS
        sampled = slice(self._num_parallel_fills % distance, None, distance)
        self._num_parallel_fills += 1
        for matcher, seconds in _fill_alone(rows[sampled], address, self._num_bytes):
            matcher.count_masks(seconds, distance)
        states = [(matcher.state, index) for matcher, index in rows]
        num_rows = 1 + rows[-1][1]
        del states[sampled]
        self._executor.unsafe_compute_mask_ptr(states, address, self._num_bytes, num_rows)


def _is_masked(allowed: GrammarCursor | int) -> bool:
    return isinstance(allowed, int) or allowed.part is not _FREE or not allowed.grammar.repeats


def _fill_alone(
    rows: list[tuple[LLGuidanceMatcher, int]], address: int, num_bytes: int
) -> Iterator[tuple[LLGuidanceMatcher, float]]:
    """Compute the masks on this thread. Yields the processor time of each."""
    started = time.thread_time()
    for matcher, index in rows:
        matcher.state.unsafe_compute_mask_ptr(address + index * num_bytes, num_bytes)
        ended = time.thread_time()
        yield matcher, ended - started
        started = ended
