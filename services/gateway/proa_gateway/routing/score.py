"""How good each candidate is for a request: one number, of what its cache saves and what its load costs. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What is known of an engine that could take a request."""

    address: str
    load: int  # unfinished requests
    kv_cache_usage: float  # 0 to 1


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)
# Hundreds of candidates are asked for each request: this way it takes half as long as by name.
_ADDRESS, _LOAD, _USAGE = attrgetter("address"), attrgetter("load"), attrgetter("kv_cache_usage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What counts how much, chosen by the simulation of docs/routing.md; no setting was best for every workload."""

    # An engine that holds the whole prompt is preferred up to four mean loads more than another's. Between 0.03 and
    # 0.25 a load's weight hardly mattered; at 0.5 chats lost 3 to 7 points of their hit rate.
    prefix: float = 1.0
    load: float = 0.25
    # Hardly more than a tie-break: a full cache is the usual state of an engine, not a fault.
    kv_usage: float = 0.1
    # But no cache is worth an engine with this many requests and this many times more than the least loaded one. At 4
    # requests too many prompts move and are computed again; without any limit popular documents make a queue.
    overload: int = 16
    overload_factor: float = 2.0


def scores(
    candidates: Sequence[Candidate], matched: Mapping[str, int], num_blocks: int, weights: Weights
) -> list[float]:
    """One for each candidate, larger is better. `matched`: by address, how many of the prompt's `num_blocks` blocks
    need not be computed; none where nothing is given."""
    loads = list(map(_LOAD, candidates))
    mean = sum(loads) / len(loads)
    by_block = weights.prefix / max(1, num_blocks)
    by_load, by_usage = weights.load / max(1.0, mean), weights.kv_usage
    at_mean = by_load * mean
    usages = map(_USAGE, candidates)
    if not matched:
        return [at_mean - by_load * load - by_usage * usage for load, usage in zip(loads, usages, strict=True)]
    counts = map(matched.get, map(_ADDRESS, candidates), repeat(0))
    return [
        by_block * count + at_mean - by_load * load - by_usage * usage
        for count, load, usage in zip(counts, loads, usages, strict=True)
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
