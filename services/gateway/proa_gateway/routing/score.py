"""How good each candidate is for a request: one number, of what its cache saves and what its load costs. Pure."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
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


def best(
    candidates: Mapping[str, AnyCandidate],
    matched: Iterable[tuple[int, Collection[str]]],
    num_blocks: int,
    weights: Weights,
    rng: random.Random,
) -> AnyCandidate:
    """The candidate, of those by address, with the largest score. `matched`: how many of the prompt's `num_blocks`
    blocks need not be computed by whom, most first, each address once."""
    mean = sum([one.load for one in candidates.values()]) / len(candidates)
    by_load, by_usage = weights.load / max(1.0, mean), weights.kv_usage

    def find_cheapest(among: Sequence[AnyCandidate]) -> tuple[AnyCandidate, float]:
        return cheapest(among, [by_load * one.load + by_usage * one.kv_cache_usage for one in among], rng)

    lightest, least = find_cheapest(list(candidates.values()))
    chosen, score = lightest, -least
    for count, addresses in matched:
        saved = weights.prefix * count / num_blocks
        if saved - least <= score:
            break  # nor can anyone with as much or less of the prompt do better
        if lightest.address in addresses:
            return lightest
        if holders := [candidates[address] for address in addresses if address in candidates]:
            holder, cost = find_cheapest(holders)
            if saved - cost > score:
                chosen, score = holder, saved - cost
    return chosen


def is_overloaded(candidate: Candidate, least: int, weights: Weights) -> bool:
    """Whether the candidate is so far above the least load of all that its cache must not count."""
    return candidate.load - least > weights.overload and candidate.load > weights.overload_factor * least


def cheapest(
    candidates: Sequence[AnyCandidate], costs: Sequence[float], rng: random.Random
) -> tuple[AnyCandidate, float]:
    """Who costs least, and how much; one of equals at random, so that gateways do not all choose alike."""
    least = min(costs)
    if costs.count(least) == 1:
        return candidates[costs.index(least)], least
    return rng.choice([one for one, cost in zip(candidates, costs, strict=True) if cost == least]), least
