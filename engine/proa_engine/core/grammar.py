"""Grammars in the core: the part of its grammar that an output is in, and the interfaces to compiler and masks.

The core knows no library of grammars: `Grammars` and `Matcher` are implemented in `proa_engine.grammar`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from proa.contract import EngineCoreRequest, Grammar


class Matcher(Protocol):
    """The state of one output under a compiled grammar."""

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the text must end here: the grammar allows no further token."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by one token. False: the grammar does not allow it or was too complex; use the matcher no more."""
        ...

    def restart(self) -> None:
        """Return to the grammar's beginning."""

    def forced(self) -> Sequence[int]:
        """The next tokens if there is no choice and the text may not end; empty where there is one.

        No mask here has another first one. They spell the text that is forced as the tokenizer does; sampled one by one
        under masks, others could spell it.
        """
        ...


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """The tokens that a step's constrained rows may sample; other rows are free.

    `rows`: indices of the step's rows, ascending. `bits`: int32 words [rows, words]; bit i % 32 of word i // 32 is set
    if token i is allowed. The memory is the caller's until two more steps have started.
    """

    rows: Sequence[int]
    bits: memoryview


class Part(Enum):
    """Where an output is: what its next token may be."""

    FIRST = auto()  # what the grammar allows, or a token of `free_if_first`
    FREE = auto()  # any token, but no end of the output unless the grammar repeats
    BOUND = auto()  # what the grammar allows


_BOUND = Part.BOUND  # looking up an enum's member takes longer than the rest of `is_complete`


class GrammarCursor:
    """Where an output is in its free and constrained parts, which `proa.contract.Grammar` defines."""

    __slots__ = ("grammar", "matcher", "part")

    def __init__(self, grammar: Grammar, matcher: Matcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.part = Part.BOUND
        if grammar.start_after:
            self.part = Part.FIRST if grammar.free_if_first else Part.FREE

    @property
    def is_complete(self) -> bool:
        """Whether the output ends here because the grammar allows nothing more."""
        return self.part is _BOUND and not self.grammar.repeats and self.matcher.is_done

    def accept(self, token_id: int) -> bool:
        """Advance by the next token of the output. False: see `Matcher.accept`."""
        if self.part is not _BOUND and self._stays_free(token_id):
            return True
        if not self.matcher.accept(token_id):
            return False
        if self.grammar.repeats and self.matcher.is_done:
            self.matcher.restart()
            self.part = Part.FREE
        return True

    def forced(self) -> Sequence[int]:
        """See `Matcher.forced`."""
        return self.matcher.forced() if self.part is _BOUND else ()

    def _stays_free(self, token_id: int) -> bool:
        """Advance by a token that may be before the grammar. Returns whether it is."""
        if self.part is Part.FIRST and token_id not in self.grammar.free_if_first:
            self.part = Part.BOUND
            return False
        self.part = Part.BOUND if token_id in self.grammar.start_after else Part.FREE
        return True


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """A request's grammar is compiled, or cannot be: `error` is a sentence for the user, empty if it is."""

    request_id: str
    cursor: GrammarCursor | None = None
    error: str = ""
    retryable: bool = False  # the engine is busy; another may take the request


class Grammars(Protocol):
    """Compiles grammars beside the step loop, and fills masks on its thread."""

    def prepare(
        self, request: EngineCoreRequest, ready: Callable[[GrammarReady], None], is_wanted: Callable[[], bool]
    ) -> GrammarCursor | None:
        """The cursor behind the request's resumed tokens. None: `ready` will be called, from any thread, unless
        `is_wanted`, called from any thread too, says before that the request was aborted."""
        ...

    def fill(self, cursors: Sequence[tuple[int, GrammarCursor]]) -> GrammarMasks | None:
        """The masks of a step's rows, given with their indices. None: no row is constrained at its present token."""
        ...
