"""Score of a candidate for a request: what its prefix cache saves, less what its load costs."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from proa.contract import Lora
from proa_gateway.routing.lora_affinity import LoraState, lora_cost


class Candidate(Protocol):
    """An engine that can take a request."""

    address: str
    load: int  # unfinished requests
    kv_cache_usage: float  # 0 to 1

    @property
    def loras(self) -> LoraState: ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the score, chosen by the simulation in docs/routing.md; no setting was best for every workload."""

    # An engine that has the whole prompt wins up to a load of four times the mean above another's. Between 0.03 and
    # 0.25 the load's weight hardly mattered; at 0.5 chats lost 3 to 7 points of their hit rate.
    prefix: float = 1.0
    load: float = 0.25
    # Little more than a tie-break: a full KV cache is an engine's usual state.
    kv_usage: float = 0.1
    # Cached blocks do not count for an engine with `overload` requests and `overload_factor` times more than the least
    # loaded one. With 4 instead of 16, too many prompts move and are computed again; without a limit, requests for
    # popular documents queue up.
    overload: int = 16
    overload_factor: float = 2.0


def best(
    candidates: Mapping[str, AnyCandidate],
    matched: Iterable[tuple[int, Collection[str]]],
    num_blocks: int,
    weights: Weights,
    rng: random.Random,
    lora: Lora | None = None,
) -> AnyCandidate:
    """Return the candidate with the largest score.

    `matched`: (length, addresses) pairs as `PrefixIndex.match` returns them, for a prompt of `num_blocks` blocks.
    `lora`: the request's adapter.
    """
    mean = sum([one.load for one in candidates.values()]) / len(candidates)
    by_load, by_usage = weights.load / max(1.0, mean), weights.kv_usage

    def find_cheapest(among: Sequence[AnyCandidate]) -> tuple[AnyCandidate, float]:
        costs = [by_load * one.load + by_usage * one.kv_cache_usage for one in among]
        if lora is not None:
            costs = [cost + lora_cost(one.loras, lora) for cost, one in zip(costs, among, strict=True)]
        return cheapest(among, costs, rng)

    lightest, least = find_cheapest(list(candidates.values()))
    chosen, score = lightest, -least
    for length, addresses in matched:
        saved = weights.prefix * length / num_blocks
        if saved - least <= score:
            break  # candidates with this length or less cannot score higher
        if lightest.address in addresses:
            return lightest
        if having := [candidates[address] for address in addresses if address in candidates]:
            candidate, cost = find_cheapest(having)
            if saved - cost > score:
                chosen, score = candidate, saved - cost
    return chosen


def is_overloaded(candidate: Candidate, least: int, weights: Weights) -> bool:
    """Return whether the candidate's load is so far above the least one that its cached blocks and adapters must not
    count."""
    return candidate.load - least > weights.overload and candidate.load > weights.overload_factor * least


def cheapest(
    candidates: Sequence[AnyCandidate], costs: Sequence[float], rng: random.Random
) -> tuple[AnyCandidate, float]:
    """Return the candidate with the lowest cost, and the cost. Ties are drawn at random, so that several gateways do
    not all choose the same one."""
    least = min(costs)
    if costs.count(least) == 1:
        return candidates[costs.index(least)], least
    return rng.choice([one for one, cost in zip(candidates, costs, strict=True) if cost == least]), least
