"""GrammarBuilder: compiles a grammar's text, and tries it on random outputs.

Some grammars fail, or get slow, only after a few tokens. Their requests are refused here, before they have begun.
"""

import random
import time
from collections.abc import Iterator

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from proa.grammar import GrammarError, check_complexity, clean, is_panic
from proa_engine.grammar.compiled import CompiledGrammar
from proa_engine.grammar.failures import explain, failure, is_limit
from proa_engine.grammar.masks import WORD, Words, allow, num_words
from proa_engine.grammar.tokenizer import GrammarTokenizer

NUM_WALKS = 4
WALK_TOKENS = 24
MASK_SECONDS = 0.005  # processor time of a mask in a walk
SPARE_SECONDS = 0.05  # by which all masks of the walks together may exceed it
BUILD_SECONDS = 2.0  # processor time of compiling with the first mask
WALKED_SECONDS = 0.02  # after walks that took longer, the lexer is built anew, without the states that they added

# A unit of fuel takes up to 2 µs and 190 bytes: with the default of a million, `(a{1000}){1000}` took 2.6 s and 187 MB.
# An enum of 12,000 strings needs more than 100,000.
_LIMITS = LLParserLimits(max_lexer_states=30_000, initial_lexer_fuel=200_000, verbose_errors=False)


class TooComplex(GrammarError):
    """The grammar may be valid, but llguidance reaches a limit or takes too long."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the grammar is too complex: {reason}")


class Unsatisfiable(GrammarError):
    """No output matches the grammar, or not every beginning that it allows can be continued."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no output can match the grammar: {reason}")


class GrammarBuilder:
    """Builds grammars for one tokenizer. Thread-safe. A thread that calls it needs a stack of 64 MiB."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._one_byte_tokens = np.zeros(num_words(tokenizer), np.uint32)
        allow(self._one_byte_tokens, [i for i in range(tokenizer.vocab_size) if len(tokenizer.decode_bytes([i])) == 1])

    def build(self, text: str) -> CompiledGrammar:
        """Return a grammar whose first mask is computed.

        Raises `GrammarError` with a sentence for the client. Releases the interpreter lock most of the time.
        """
        check_complexity(text)
        try:
            grammar = self._compile(text)
            started = time.thread_time()
            self._try(grammar)
            if time.thread_time() - started > WALKED_SECONDS:
                grammar = self._compile(text)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise TooComplex("llguidance cannot compile it") from None
        return grammar

    def _compile(self, text: str) -> CompiledGrammar:
        started = time.thread_time()
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            message = matcher.get_error()
            raise TooComplex(explain(message)) if is_limit(message) else GrammarError(clean(message))
        matcher.compute_bitmask()
        _check(matcher)
        seconds = time.thread_time() - started
        if seconds > BUILD_SECONDS:
            raise TooComplex(f"it takes {seconds:.1f} s to compile")
        return CompiledGrammar(matcher, seconds)

    def _try(self, grammar: CompiledGrammar) -> None:
        """Walk through the grammar at random."""
        rng, spare = random.Random(0), SPARE_SECONDS
        for _ in range(NUM_WALKS):
            for seconds in self._walk(grammar.start(), rng):
                grammar.count_masks(seconds)
                spare -= max(0.0, seconds - MASK_SECONDS)
                if spare < 0:
                    raise TooComplex("its masks take too long to compute")

    def _walk(self, matcher: LLMatcher, rng: random.Random) -> Iterator[float]:
        """Consume random tokens, every second one of a single byte if possible. Yields the times of the masks."""
        for step in range(WALK_TOKENS):
            started = time.thread_time()
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(self._one_byte_tokens)]
            yield time.thread_time() - started
            _check(matcher)
            if not mask.any():
                raise Unsatisfiable(f"nothing can follow its first {step} tokens")
            one_byte = mask & self._one_byte_tokens
            matcher.consume_token(_random_token(one_byte if step % 2 and one_byte.any() else mask, rng))
            _check(matcher)
            if matcher.is_stopped():
                return


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = failure(matcher)
        raise TooComplex(reason) if is_limit(matcher.get_error()) else Unsatisfiable(reason)


def _random_token(mask: Words, rng: random.Random) -> int:
    """A token of the mask, which is not empty: first a word, then a bit of it."""
    index = int(rng.choice(mask.nonzero()[0]))
    word = int(mask[index])
    return index * WORD + rng.choice([bit for bit in range(WORD) if word >> bit & 1])
