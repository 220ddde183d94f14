"""Ways to draw a draft token from what a drafter computes.

A draft token is accepted where it equals the model's own sample, so each way gives the same outputs and only another
share of accepted drafts. Greedy proposes the likeliest token. The others draw with the noise with which the model will
draw, at the request's temperature or at a part of it: if both are open to several tokens, equal noise makes them agree
(Gumbel coupling, Daliri et al. 2024, arXiv 2408.07978); if the model is sure and only the drafter is not, they lose to
greedy. Which of the two holds depends on the model, the text and the temperature, so it is measured while running: all
ways' first tokens are compared with the sample. A draw with noise of its own always loses to equal noise, and one at a
higher temperature than the request's to a lower one.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    factor: float  # of the request's temperature


GREEDY, HALF, FULL = Way("greedy", 0.0), Way("half", 0.5), Way("full", 1.0)
# By `draft_sample_method`. Of several, the one that is right most often is used; among equals the first.
WAYS: Mapping[str, tuple[Way, ...]] = {"greedy": (GREEDY,), "probabilistic": (FULL,), "auto": (GREEDY, HALF, FULL)}
TEMPERATURES = (0.2, 0.5, 0.85)  # ways are compared by range of temperatures, between these
RANGES = ("0-0.2", "0.2-0.5", "0.5-0.85", "0.85-")


def range_of(temperature: float) -> int:
    """The index of the temperature's range in `RANGES`."""
    return bisect_right(TEMPERATURES, temperature)
