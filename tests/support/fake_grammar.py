"""Grammars over token ids, without text: a compiler that finishes when the test says so, and masks of the fake model.

The text of a grammar is `seed length fuel run`: the state is a hash of all tokens, which also says what may follow.
"""

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from proa.contract import EngineCoreRequest, FinishReason, Grammar
from proa_engine.core.grammar import GrammarCursor, GrammarMasks, GrammarReady, MaskedSample, Part
from support.fake_embeds import with_embeds
from support.fake_executor import VOCAB_SIZE, choose, fingerprint, first_context
from support.fake_images import seen

WORDS = -(-VOCAB_SIZE // 32)
NEVER = 10_000


CYCLE = 8  # tokens


def fake_grammar(seed: int = 1, length: int = NEVER, fuel: int = NEVER, run: int = 0, **fields: Any) -> Grammar:
    """A grammar that is complete after `length` tokens, and fails when it needs the mask after `fuel` tokens.

    It forces the last `run` tokens of each `CYCLE`.
    """
    return Grammar(text=f"{seed} {length} {fuel} {run}", **fields)


def compiles(grammar: Grammar | None) -> bool:
    return grammar is not None and grammar.text not in ("invalid", "busy")


class FakeMatcher:
    """A `Matcher`. A failed one allows everything, as llguidance's does."""

    def __init__(self, text: str, eos_token_ids: frozenset[int]) -> None:
        self._seed, self._length, self._fuel, self._run = map(int, text.split())
        self._eos_token_ids = eos_token_ids
        self._failed = False
        self._num_tokens = 0
        self._state = self._seed
        self._ended = False

    @property
    def is_accepting(self) -> bool:
        return self.is_done or (self._state % 5 == 1 and not self._is_forced)

    @property
    def is_done(self) -> bool:
        return self._ended or self._num_tokens >= self._length

    def accept(self, token_id: int) -> bool:
        assert not self._failed or self._num_tokens == self._fuel, "a matcher that refused a token is asked again"
        allowed = self.allowed()  # fails without fuel
        if self._failed or token_id not in allowed:
            self._failed = True
            return False
        self._ended = token_id in self._eos_token_ids
        self._num_tokens += 1
        self._state = fingerprint(self._state, token_id)
        return True

    @property
    def error(self) -> str:
        return "no fuel is left" if self._num_tokens == self._fuel else ""

    def restart(self) -> None:
        self._num_tokens = 0
        self._state = self._seed
        self._ended = False

    def copy(self) -> "FakeMatcher":
        return copy(self)

    def forced(self) -> list[int]:
        """One forced token or more, but not always as many as there are."""
        state, tokens = copy(self), list[int]()
        while len(allowed := state.allowed()) == 1 and not state.is_done and len(tokens) <= self._state % 7:
            tokens += allowed
            assert state.accept(tokens[-1])
        self._failed |= not tokens and state._failed
        return tokens

    @property
    def _is_forced(self) -> bool:
        return self._num_tokens % CYCLE >= CYCLE - self._run

    def allowed(self) -> set[int]:
        if self._num_tokens == self._fuel:
            self._failed = True
            return set(range(VOCAB_SIZE))
        if self.is_done:
            return set(self._eos_token_ids)
        if self._is_forced:
            return {1 + self._state % (VOCAB_SIZE - 1)} - self._eos_token_ids
        allowed = {token_id for token_id in range(VOCAB_SIZE) if (token_id * 7 + self._state) % 3}
        return allowed | self._eos_token_ids if self.is_accepting else allowed - self._eos_token_ids


def allowed_tokens(cursor: GrammarCursor, eos_token_ids: frozenset[int]) -> set[int]:
    """What the next token may be."""
    matcher = cursor.matcher
    assert isinstance(matcher, FakeMatcher)
    if cursor.part is Part.FREE:
        return set(range(VOCAB_SIZE)) - (frozenset() if cursor.grammar.repeats else eos_token_ids)
    first = cursor.grammar.free_if_first if cursor.part is Part.FIRST else ()
    return matcher.allowed().union(first)


def generate_constrained(
    request: EngineCoreRequest, eos_token_ids: frozenset[int], limit: int
) -> tuple[list[int], FinishReason]:
    """What the request must produce, resumed tokens included, said without any scheduling."""
    params = request.sampling_params
    prompt = with_embeds(seen(request.prompt_token_ids, request.media), request.prompt_embeds)
    assert params.grammar is not None
    cursor = GrammarCursor(params.grammar, FakeMatcher(params.grammar.text, eos_token_ids))
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
    context, output = first_context(request.lora_digest), list[int]()
    for token_id in prompt:
        context = fingerprint(context, token_id)
    while not cursor.is_complete:
        token_id = choose(context, allowed_tokens(cursor, eos_token_ids))
        if not cursor.accept(token_id):
            return output, FinishReason.ERROR
        output.append(token_id)
        context = fingerprint(context, token_id)
        if token_id in ends and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
        if token_id in eos_token_ids and cursor.is_complete:
            return output, FinishReason.STOP
        if not cursor.is_complete and (len(output) == params.max_tokens or len(prompt) + len(output) == limit):
            return output, FinishReason.LENGTH
    return output, FinishReason.COMPLETE


@dataclass
class FakeGrammars:
    """A `Grammars`. Texts in `known` are prepared at once; the others wait in `jobs` for `compile`.

    A text of "invalid" or "busy" cannot be compiled. `fills` holds the rows of each call. `is_wanted`: by request.
    Masks have `num_words` words, but allow tokens of the fake model alone.
    """

    eos_token_ids: frozenset[int]
    num_words: int = WORDS
    known: set[str] = field(default_factory=set)
    jobs: list[tuple[EngineCoreRequest, Callable[[GrammarReady], None]]] = field(default_factory=list)
    fills: list[list[int]] = field(default_factory=list)
    is_wanted: dict[str, Callable[[], bool]] = field(default_factory=dict)

    def prepare(
        self, request: EngineCoreRequest, ready: Callable[[GrammarReady], None], is_wanted: Callable[[], bool]
    ) -> GrammarCursor | None:
        grammar = request.sampling_params.grammar
        assert grammar is not None
        if grammar.text in self.known:
            return self._cursor(grammar, request.resumed_token_ids)
        self.jobs.append((request, ready))
        self.is_wanted[request.request_id] = is_wanted
        return None

    def fill(self, samples: Sequence[MaskedSample]) -> GrammarMasks | None:
        rows, places, allowed = zip(*samples, strict=True)
        self.fills.append(list(rows))
        words = array("i")
        for each in allowed:
            ids = {each} if isinstance(each, int) else allowed_tokens(each, self.eos_token_ids)
            bits = sum(1 << token_id for token_id in ids)
            words.frombytes(bits.to_bytes(4 * self.num_words, "little"))
        bits_of_rows = memoryview(words).cast("B").cast("i", (len(samples), self.num_words))
        return GrammarMasks(rows, places, bits_of_rows)

    def compile(self, index: int = 0) -> None:
        """Finish a job."""
        request, ready = self.jobs.pop(index)
        grammar = request.sampling_params.grammar
        assert grammar is not None
        if not compiles(grammar):
            ready(GrammarReady(request.request_id, error=f"{grammar.text} text", retryable=grammar.text == "busy"))
        else:
            ready(GrammarReady(request.request_id, self._cursor(grammar, request.resumed_token_ids)))

    def compile_all(self) -> None:
        while self.jobs:
            self.compile()

    def _cursor(self, grammar: Grammar, resumed: Sequence[int]) -> GrammarCursor:
        cursor = GrammarCursor(grammar, FakeMatcher(grammar.text, self.eos_token_ids))
        assert all(cursor.accept(token_id) for token_id in resumed)
        return cursor


def constrained(requests: Sequence[EngineCoreRequest], vocab_size: int) -> tuple[list[EngineCoreRequest], FakeGrammars]:
    """Two of three requests with a grammar, most of which force tokens; and the grammars, compiled."""
    wanted = [
        replace(each, sampling_params=replace(each.sampling_params, grammar=grammar, allowed_token_ids=()))
        for index, each in enumerate(requests)
        for grammar in [fake_grammar(index, run=index % 8) if index % 3 else None]
    ]
    grammars = FakeGrammars(frozenset(), num_words=-(-vocab_size // 32))
    grammars.known = {each.sampling_params.grammar.text for each in wanted if each.sampling_params.grammar}
    return wanted, grammars
