"""Sampling parameters on the device: a float64 table with a row for each slot and a column for each parameter.

float64 represents 32-bit words exactly. `PARAMETERS` is the only list of the parameters that change logits; packing,
finding the rows that need an operation, and warm-up derive from it.
"""

from enum import IntEnum
from typing import NamedTuple

TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, TOP_K, KEY_LO, KEY_HI, NUM_PROMPT, NUM_COLUMNS = range(11)

# Temperatures below this are greedy, because dividing by them overflows.
MIN_TEMPERATURE = 1e-5


class SamplingOperation(IntEnum):
    """What the sampler does to the logits of rows with certain parameters."""

    PENALTIES = 0
    MIN_P = 1
    TOP_K_TOP_P = 2


# Operations that limit the tokens that may be sampled; greedy rows skip them.
LIMITS = (SamplingOperation.MIN_P, SamplingOperation.TOP_K_TOP_P)


class Parameter(NamedTuple):
    """A field of SamplingParams."""

    name: str
    column: int
    neutral: float | None  # value that changes no logits; None: the size of the vocabulary, also written 0
    example: float  # a value that does change logits, for warm-up steps
    operation: SamplingOperation


PARAMETERS = (
    Parameter("repetition_penalty", REPETITION, 1, 1.1, SamplingOperation.PENALTIES),
    Parameter("frequency_penalty", FREQUENCY, 0, 0.1, SamplingOperation.PENALTIES),
    Parameter("presence_penalty", PRESENCE, 0, 0.1, SamplingOperation.PENALTIES),
    Parameter("min_p", MIN_P, 0, 0.01, SamplingOperation.MIN_P),
    Parameter("top_k", TOP_K, None, 10, SamplingOperation.TOP_K_TOP_P),
    Parameter("top_p", TOP_P, 1, 0.9, SamplingOperation.TOP_K_TOP_P),
)
