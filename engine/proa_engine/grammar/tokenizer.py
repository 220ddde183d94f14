"""The model's tokenizer as llguidance needs it, and masks of given tokens."""

import logging
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from proa.grammar import is_panic

Words = npt.NDArray[np.uint32]  # a mask: bit i % 32 of word i // 32 is set if token i is allowed

GrammarTokenizer = LLTokenizer
WORD = 32  # bits

_log = logging.getLogger(__name__)


def make_tokenizer(tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Iterable[int]) -> GrammarTokenizer | None:
    """Returns None, and logs why, if llguidance cannot read the tokenizer.

    `vocab_size` is the number of logits; its masks have at least as many bits. Holds the interpreter lock all the
    while: 0.9 s and 130 MB for 150,000 tokens.
    """
    text, eos = tokenizer_json.decode(), sorted(eos_token_ids) or None
    try:
        try:
            return GrammarTokenizer(text, n_vocab=vocab_size, eos_token=eos)
        except ValueError:  # perhaps there are more tokens than logits
            return GrammarTokenizer(text, eos_token=eos)
    except BaseException as error:
        if not (isinstance(error, ValueError) or is_panic(error)):
            raise
        _log.warning("requests with grammars will be refused: the tokenizer cannot be read by llguidance: %s", error)
        return None


def num_words(tokenizer: GrammarTokenizer) -> int:
    """The length of a mask, in words."""
    return -(-tokenizer.vocab_size // WORD)


def allow(mask: Words, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        mask[token_id // WORD] |= np.uint32(1 << token_id % WORD)


def forbid(mask: Words, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        mask[token_id // WORD] &= np.uint32(~(1 << token_id % WORD) & 0xFFFFFFFF)
