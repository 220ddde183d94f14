"""How good each candidate is for a request: one number, of what its cache saves and what its load costs. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What is known of an engine that could take a request."""

    address: str
    load: int  # unfinished requests
    kv_cache_usage: float  # 0 to 1


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What counts how much; why these is told in docs/routing.md.

    With the mean load as unit, `prefix` says how far above the mean an engine may be that holds the whole prompt, and
    still be chosen before one with mean load that holds nothing. `overload`: no cache is worth an engine whose load
    is above the least one both by this many requests and by `overload_factor` times.
    """

    prefix: float = 1.0
    load: float = 0.25
    kv_usage: float = 0.1
    overload: int = 16
    overload_factor: float = 2.0


def scores(
    candidates: Sequence[Candidate], matched: Mapping[str, int], num_blocks: int, weights: Weights
) -> list[float]:
    """One for each candidate, larger is better. `matched`: by address, how many of the prompt's `num_blocks` blocks
    need not be computed; none where nothing is given."""
    loads = [candidate.load for candidate in candidates]
    mean = sum(loads) / len(loads)
    by_block = weights.prefix / max(1, num_blocks)
    by_load, by_usage = weights.load / max(1.0, mean), weights.kv_usage
    at_mean, get = by_load * mean, matched.get
    return [
        by_block * get(one.address, 0) + at_mean - by_load * one.load - by_usage * one.kv_cache_usage
        for one in candidates
    ]


def best(candidates: Sequence[AnyCandidate], values: Sequence[float], rng: random.Random) -> AnyCandidate:
    """The candidate with the largest value; one of equals at random, so that gateways do not all choose alike."""
    largest = max(values)
    if values.count(largest) == 1:
        return candidates[values.index(largest)]
    return rng.choice([candidate for candidate, value in zip(candidates, values, strict=True) if value == largest])


def is_overloaded(candidate: Candidate, least: int, weights: Weights) -> bool:
    """Whether the candidate is so far above the least load of all that its cache must not count."""
    return candidate.load - least > weights.overload and candidate.load > weights.overload_factor * least
