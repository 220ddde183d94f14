"""Grammars in the core: an output's position in its grammar, and the interfaces to the compiler and the masks.

The core imports no grammar library: `Grammars` and `Matcher` are implemented in `proa_engine.grammar`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

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
        """Advance by one token. Returns False if the grammar rejects it or is too complex; the matcher must not be used
        afterwards."""
        ...

    @property
    def error(self) -> str:
        """Why the matcher failed, as a clause. Empty: it has not, or only because it was given a token that the grammar
        does not allow."""
        ...

    def restart(self) -> None:
        """Return to the grammar's beginning."""

    def copy(self) -> "Matcher":
        """Return a matcher in the same state, which advances alone. It takes microseconds."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the next tokens while the grammar leaves no choice; empty if there is a choice or the text may end.

        The mask at this position allows no other first token. The following ones spell the forced text as the tokenizer
        does; sampling under masks one at a time could spell it with other tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """The tokens that a step's constrained samples may be. Samples that are not listed may be any token.

    `rows` and `places` [masks], ascending: indices of the step's rows, and of the samples of each: 0 behind its known
    tokens, i behind its draft token i. `bits`: int32 words [masks, words]; bit i % 32 of word i // 32 is set if token i
    is allowed. The producer reuses the memory after two more steps have started, or as many as there are pipeline
    stages.
    """

    rows: Sequence[int]
    places: Sequence[int]
    bits: memoryview


class Part(Enum):
    """The part of the output that the next token belongs to, which decides whether it is constrained."""

    FIRST = auto()  # the next token must be allowed by the grammar or be one of `free_if_first`
    FREE = auto()  # any token; the output may end only if the grammar repeats
    BOUND = auto()  # the next token must be allowed by the grammar


_BOUND = Part.BOUND  # looking up an enum's member takes longer than the rest of `is_complete`


class GrammarCursor:
    """An output's position in its free and constrained parts, which `proa.contract.Grammar` defines."""

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

    def walk(self, draft_ids: Sequence[int]) -> "Iterator[GrammarCursor]":
        """Yield this cursor, and cursors behind each of `draft_ids` until one is refused or completes the grammar.

        A refused draft token cannot be sampled, so what follows it needs no mask.
        """
        cursor = self
        yield cursor
        for token_id in draft_ids:
            cursor = cursor._copy()
            if not cursor.accept(token_id) or cursor.is_complete:
                return
            yield cursor

    def forced(self) -> Sequence[int]:
        """See `Matcher.forced`."""
        return self.matcher.forced() if self.part is _BOUND else ()

    def _copy(self) -> "GrammarCursor":
        cursor = GrammarCursor(self.grammar, self.matcher.copy())
        cursor.part = self.part
        return cursor

    def _stays_free(self, token_id: int) -> bool:
        """Advance by a token that may precede the grammar. Returns whether it does."""
        if self.part is Part.FIRST and token_id not in self.grammar.free_if_first:
            self.part = Part.BOUND
            return False
        self.part = Part.BOUND if token_id in self.grammar.start_after else Part.FREE
        return True


class MaskedSample(NamedTuple):
    """A sample of a step that needs a mask. `row` and `place` as in `GrammarMasks`."""

    row: int
    place: int
    allowed: GrammarCursor | int  # what the cursor allows, or this token alone


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The result of compiling a request's grammar. `error` is empty on success, otherwise a message for the client."""

    request_id: str
    cursor: GrammarCursor | None = None
    error: str = ""
    retryable: bool = False  # the engine is busy; another engine may accept the request


class Grammars(Protocol):
    """Compiles grammars on other threads than the step loop's, and fills masks on the step loop's."""

    def prepare(
        self, request: EngineCoreRequest, ready: Callable[[GrammarReady], None], is_wanted: Callable[[], bool]
    ) -> GrammarCursor | None:
        """Return the grammar's cursor, advanced past the tokens that the request resumes with, if the grammar is
        cached.

        Otherwise return None and call `ready` from any thread when it is compiled. `is_wanted` (any thread) returns
        False if the request was aborted meanwhile; `ready` need not be called then.
        """
        ...

    def fill(self, samples: Sequence[MaskedSample]) -> GrammarMasks | None:
        """Return the masks of a step's samples. None: none of them is constrained at its token."""
        ...


class NoGrammars:
    """In place of `Grammars` in an engine that cannot compile any, which rejects requests with one."""

    def prepare(
        self, request: EngineCoreRequest, ready: Callable[[GrammarReady], None], is_wanted: Callable[[], bool]
    ) -> GrammarCursor | None:
        raise NotImplementedError

    def fill(self, samples: Sequence[MaskedSample]) -> GrammarMasks | None:
        raise NotImplementedError
