"""GrammarBuilder: a grammar's text to a matcher, which is tried on random outputs."""

import random
import time
from collections.abc import Iterator

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from proa.grammar import GrammarError, check_complexity, clean, is_panic
from proa_engine.grammar.tokenizer import WORD, GrammarTokenizer, Words, allow, num_words

NUM_WALKS = 4
WALK_TOKENS = 24
MASK_SECONDS = 0.005  # processor time of a mask in a walk
SPARE_SECONDS = 0.05  # by which all masks of the walks together may exceed it

_LIMITS = LLParserLimits(max_lexer_states=30_000, verbose_errors=False)


class TooComplex(GrammarError):
    """The grammar can be compiled, but llguidance fails or takes too long to compute masks."""

    def __init__(self) -> None:
        super().__init__("the grammar is too complex")


class GrammarBuilder:
    """Builds matchers for one tokenizer. Thread-safe. A thread that calls it needs a stack of 64 MiB."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._one_byte_tokens = np.zeros(num_words(tokenizer), np.uint32)
        allow(self._one_byte_tokens, [i for i in range(tokenizer.vocab_size) if len(tokenizer.decode_bytes([i])) == 1])

    def build(self, text: str) -> LLMatcher:
        """Returns a matcher at the grammar's beginning, whose first mask is computed.

        Raises `GrammarError` with a sentence for the client. Releases the interpreter lock most of the time.
        """
        check_complexity(text)
        try:
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
            if matcher.is_error():
                raise GrammarError(clean(matcher.get_error()))
            matcher.compute_bitmask()
            self._try(matcher)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise TooComplex from None
        return matcher

    def _try(self, matcher: LLMatcher) -> None:
        """Walk through the grammar at random: some grammars fail, or get slow, only after a few tokens."""
        rng, spare = random.Random(0), SPARE_SECONDS
        for _ in range(NUM_WALKS):
            for seconds in self._walk(matcher.deep_copy(), rng):
                spare -= max(0.0, seconds - MASK_SECONDS)
                if spare < 0:
                    raise TooComplex

    def _walk(self, matcher: LLMatcher, rng: random.Random) -> Iterator[float]:
        """Consume random tokens, every second one of a single byte if possible. Yields the times of the masks."""
        for step in range(WALK_TOKENS):
            started = time.thread_time()
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(self._one_byte_tokens)]
            yield time.thread_time() - started
            if not mask.any():
                raise TooComplex
            one_byte = mask & self._one_byte_tokens
            matcher.consume_token(_random_token(one_byte if step % 2 and one_byte.any() else mask, rng))
            if matcher.is_error():
                raise TooComplex
            if matcher.is_stopped():
                return


def _random_token(mask: Words, rng: random.Random) -> int:
    """A token of the mask, which is not empty: first a word, then a bit of it."""
    index = int(rng.choice(mask.nonzero()[0]))
    word = int(mask[index])
    return index * WORD + rng.choice([bit for bit in range(WORD) if word >> bit & 1])
