"""Handmade masks of grammars."""

from collections.abc import Collection, Mapping

import numpy as np

from proa_engine.core.grammar import GrammarMasks
from proa_engine.kernels.sampling.token_bitmask import WORD


def masks_of(allowed: Mapping[int, Collection[int]], vocab_size: int) -> GrammarMasks:
    """Masks by row of the step, of the ids that the row may sample."""
    is_allowed = np.zeros((len(allowed), -(-vocab_size // WORD) * WORD), bool)
    for index, ids in enumerate(allowed.values()):
        is_allowed[index, list(ids)] = True
    bits = np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32)
    return GrammarMasks(list(allowed), [0] * len(allowed), bits.data)
