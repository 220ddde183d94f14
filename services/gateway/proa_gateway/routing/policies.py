"""Routing policies: how one of several engines is chosen for a request. `make_policy` finds them by name."""

import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import ClassVar, Protocol

from proa_gateway.routing.hints import RoutingHints
from proa_gateway.routing.index import PrefixIndex
from proa_gateway.routing.lora_affinity import having_lora, lora_cost
from proa_gateway.routing.score import AnyCandidate, Weights, best, cheapest, is_overloaded

BOUNDED_LOAD = 1.25
"""`SessionAffinity`: an engine takes at most this multiple of the mean load."""

WEIGHTS = Weights()

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 6.4)


class Policy(Protocol):
    """Call `choose`, then `record_sent` when the request is sent to the chosen engine."""

    name: ClassVar[str]
    needs_hashes: ClassVar[bool]  # whether hints must have block hashes

    def choose(self, candidates: Mapping[str, AnyCandidate], hints: RoutingHints) -> AnyCandidate:
        """Return one of the candidates, of which there is at least one. Keys are addresses."""
        ...

    def record_sent(self, address: str, hints: RoutingHints) -> int:
        """Record that the request is sent. Return how many of its prompt tokens are expected to be cached there."""
        ...


class LeastLoad:
    """The candidate with the fewest unfinished requests, of those that have the request's adapter unless they are
    overloaded."""

    name: ClassVar[str] = "least-load"
    needs_hashes: ClassVar[bool] = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Mapping[str, AnyCandidate], hints: RoutingHints) -> AnyCandidate:
        engines = list(candidates.values())
        loads = [engine.load for engine in engines]
        if (lora := hints.lora) is not None:
            having = having_lora(engines, lora)
            chosen = cheapest(having, [one.load + lora_cost(one.loras, lora) for one in having], self._rng)[0]
            if not is_overloaded(chosen, min(loads), WEIGHTS):
                return chosen
        return cheapest(engines, loads, self._rng)[0]

    def record_sent(self, address: str, hints: RoutingHints) -> int:
        return 0


class RoundRobin:
    """Each candidate in turn, from a random start, so that several gateways do not choose in lockstep.

    A request with an adapter goes in turn to those that have it, if any has.
    """

    name: ClassVar[str] = "round-robin"
    needs_hashes: ClassVar[bool] = False

    def __init__(self, rng: random.Random) -> None:
        self._turn = rng.randrange(2**16)

    def choose(self, candidates: Mapping[str, AnyCandidate], hints: RoutingHints) -> AnyCandidate:
        self._turn += 1
        engines: Sequence[AnyCandidate] = list(candidates.values())
        if hints.lora is not None:
            engines = having_lora(engines, hints.lora)
        return engines[self._turn % len(engines)]

    def record_sent(self, address: str, hints: RoutingHints) -> int:
        return 0


class SessionAffinity:
    """All requests of a session go to one candidate; requests without a session ID to the least loaded one.

    Rendezvous hashing of session ID and address (Thaler and Ravishankar, 1998): every gateway chooses the same
    candidate, and only the sessions of a candidate that comes or goes move. With bounded loads (Mirrokni, Thorup and
    Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018): if the first candidate has more than `BOUNDED_LOAD`
    times the mean load, the next one in the session's order takes the request.
    """

    name: ClassVar[str] = "session"
    needs_hashes: ClassVar[bool] = False

    def __init__(self, rng: random.Random) -> None:
        self._least_load = LeastLoad(rng)
        self._address_hashes = _AddressHashes()

    def choose(self, candidates: Mapping[str, AnyCandidate], hints: RoutingHints) -> AnyCandidate:
        if hints.session_id is None:
            return self._least_load.choose(candidates, hints)
        limit = BOUNDED_LOAD * (1 + sum([candidate.load for candidate in candidates.values()]) / len(candidates))
        below_limit = [candidate for candidate in candidates.values() if candidate.load < limit]
        key, hashes = _hash64(hints.session_id), self._address_hashes
        ranks = [(key ^ hashes[candidate.address]) * _GOLDEN & _MASK for candidate in below_limit]
        return below_limit[ranks.index(max(ranks))]

    def record_sent(self, address: str, hints: RoutingHints) -> int:
        return 0


class _AddressHashes(dict[str, int]):
    """Hashes by address, computed on first use. About 150 bytes for each address ever seen."""

    def __missing__(self, address: str) -> int:
        value = self[address] = _hash64(address)
        return value


class Prefix:
    """The candidate with the best score of cached prompt blocks, adapters and load; see `score`."""

    name: ClassVar[str] = "prefix"
    needs_hashes: ClassVar[bool] = True

    def __init__(self, index: PrefixIndex, rng: random.Random, clock: Callable[[], float], weights: Weights) -> None:
        self._index = index
        self._rng = rng
        self._clock = clock
        self._weights = weights

    def choose(self, candidates: Mapping[str, AnyCandidate], hints: RoutingHints) -> AnyCandidate:
        reusable, lora = hints.reusable, hints.lora
        matched = self._index.match(reusable)
        having = candidates
        if lora is not None:
            having = {one.address: one for one in having_lora(list(candidates.values()), lora)}
        chosen = best(having, matched, len(reusable), self._weights, self._rng, lora)
        if (not matched and lora is None) or chosen.load <= self._weights.overload:
            return chosen
        least = min([candidate.load for candidate in candidates.values()])
        if not is_overloaded(chosen, least, self._weights):
            return chosen
        # A candidate that has fewer blocks of the prompt, or not the adapter, may still be better than the least loaded
        # one.
        others = {address: one for address, one in candidates.items() if not is_overloaded(one, least, self._weights)}
        return best(others, matched, len(reusable), self._weights, self._rng, lora)

    def record_sent(self, address: str, hints: RoutingHints) -> int:
        if hints.chain is None:
            return 0
        return self._index.add_pending(address, hints, self._clock()) * hints.chain.block_size


POLICIES: tuple[str, ...] = (Prefix.name, LeastLoad.name, RoundRobin.name, SessionAffinity.name)


def make_policy(name: str, index: PrefixIndex, rng: random.Random, clock: Callable[[], float]) -> Policy:
    """`clock` returns seconds. Raises `ValueError` if `name` is not one of `POLICIES`."""
    match name:
        case Prefix.name:
            return Prefix(index, rng, clock, WEIGHTS)
        case LeastLoad.name:
            return LeastLoad(rng)
        case RoundRobin.name:
            return RoundRobin(rng)
        case SessionAffinity.name:
            return SessionAffinity(rng)
    raise ValueError(f"unknown routing policy {name!r}, must be one of {', '.join(POLICIES)}")


def _hash64(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8])
