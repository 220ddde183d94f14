"""Policies: how one of several engines is chosen for a request. `make_policy` knows them by name."""

import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import ClassVar, Protocol

from proa_gateway.routing.index import PrefixIndex
from proa_gateway.routing.score import AnyCandidate, Weights, best, cheapest, is_overloaded
from proa_gateway.types import RoutingHints

BOUNDED_LOAD = 1.25
"""Times the mean load that a session's own engine may have; consistent hashing with bounded loads."""

_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio


class Policy(Protocol):
    """`choose`, then `sent` where the request goes there."""

    name: ClassVar[str]
    needs_hashes: ClassVar[bool]  # of the prompt's blocks in the wish

    def choose(self, candidates: Mapping[str, AnyCandidate], wish: RoutingHints) -> AnyCandidate:
        """One of the candidates, which are given by address, and of which there is one at least."""
        ...

    def sent(self, address: str, wish: RoutingHints) -> int:
        """The request is on its way. Returns how many of its prompt's tokens the engine will find in its cache, as far
        as is known."""
        ...


class LeastLoad:
    """The candidate with the fewest unfinished requests."""

    name: ClassVar[str] = "least-load"
    needs_hashes: ClassVar[bool] = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Mapping[str, AnyCandidate], wish: RoutingHints) -> AnyCandidate:
        engines = list(candidates.values())
        return cheapest(engines, [engine.load for engine in engines], self._rng)[0]

    def sent(self, address: str, wish: RoutingHints) -> int:
        return 0


class RoundRobin:
    """One after the other, from a random beginning, so that gateways do not go in step."""

    name: ClassVar[str] = "round-robin"
    needs_hashes: ClassVar[bool] = False

    def __init__(self, rng: random.Random) -> None:
        self._turn = rng.randrange(2**16)

    def choose(self, candidates: Mapping[str, AnyCandidate], wish: RoutingHints) -> AnyCandidate:
        self._turn += 1
        return list(candidates.values())[self._turn % len(candidates)]

    def sent(self, address: str, wish: RoutingHints) -> int:
        return 0


class Session:
    """A session's requests go to one candidate, which follows from key and addresses alone (rendezvous hashing), so
    every gateway chooses the same, and a candidate that comes or goes moves its own share only. Where it has more
    than its share of the load, the session's next candidate takes the request; without a key, the least loaded."""

    name: ClassVar[str] = "session"
    needs_hashes: ClassVar[bool] = False

    def __init__(self, rng: random.Random) -> None:
        self._least_load = LeastLoad(rng)
        self._seeds = _Seeds()

    def choose(self, candidates: Mapping[str, AnyCandidate], wish: RoutingHints) -> AnyCandidate:
        if wish.session is None:
            return self._least_load.choose(candidates, wish)
        limit = BOUNDED_LOAD * (1 + sum([candidate.load for candidate in candidates.values()]) / len(candidates))
        free = [candidate for candidate in candidates.values() if candidate.load < limit]
        key, seeds = _number(wish.session), self._seeds
        ranks = [(key ^ seeds[candidate.address]) * _ODD & _MASK for candidate in free]
        return free[ranks.index(max(ranks))]

    def sent(self, address: str, wish: RoutingHints) -> int:
        return 0


class _Seeds(dict[str, int]):
    """By address, made when first asked for. Small even where addresses come and go for months."""

    def __missing__(self, address: str) -> int:
        seed = self[address] = _number(address)
        return seed


class Prefix:
    """The candidate with the best score, by what the index says of its cache; see `score`."""

    name: ClassVar[str] = "prefix"
    needs_hashes: ClassVar[bool] = True

    def __init__(self, index: PrefixIndex, rng: random.Random, clock: Callable[[], float], weights: Weights) -> None:
        self._index = index
        self._rng = rng
        self._clock = clock
        self._weights = weights

    def choose(self, candidates: Mapping[str, AnyCandidate], wish: RoutingHints) -> AnyCandidate:
        usable = _usable(wish)
        matched = self._index.match(usable)
        chosen = best(candidates, matched, len(usable), self._weights, self._rng)
        if not matched or chosen.load <= self._weights.overload:
            return chosen
        least = min([candidate.load for candidate in candidates.values()])
        if not is_overloaded(chosen, least, self._weights):
            return chosen
        # One that holds less of the prompt, but something, may still be better than the least loaded.
        fit = {address: one for address, one in candidates.items() if not is_overloaded(one, least, self._weights)}
        return best(fit, matched, len(usable), self._weights, self._rng)

    def sent(self, address: str, wish: RoutingHints) -> int:
        if wish.chain is None:
            return 0
        num_held = self._index.expect(address, wish.chain, wish.block_hashes, self._clock())
        return min(num_held, len(_usable(wish))) * wish.chain.block_size


POLICIES: tuple[str, ...] = (Prefix.name, LeastLoad.name, RoundRobin.name, Session.name)


def make_policy(name: str, index: PrefixIndex, rng: random.Random, clock: Callable[[], float]) -> Policy:
    """`clock` gives seconds. Raises `ValueError` for a name that is not in `POLICIES`."""
    match name:
        case Prefix.name:
            return Prefix(index, rng, clock, Weights())
        case LeastLoad.name:
            return LeastLoad(rng)
        case RoundRobin.name:
            return RoundRobin(rng)
        case Session.name:
            return Session(rng)
    raise ValueError(f"there is no routing policy {name!r}; there are {', '.join(POLICIES)}")


def _usable(wish: RoutingHints) -> Sequence[bytes]:
    """The blocks that a cache can save: a prompt's last token is always computed, so a full last block is not one."""
    return wish.block_hashes[: (wish.num_tokens - 1) // wish.chain.block_size] if wish.chain is not None else ()


def _number(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8])
