"""Routing policies: how one of several engines is chosen for a request. `make_policy` finds them by name."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar, Protocol, TypeVar

from proa.blocks import root_hash
from proa.contract import Lora, ModelInfo

# Costs of an adapter, in the score's unit, of which a whole cached prompt saves 1.
LOAD_COST = 8.0
"""The engine must load the adapter first. More than cached blocks save and than loads differ in general: an adapter
comes to one more engine when all that have it are overloaded (`is_overloaded`)."""
WAIT_COST = 0.5
"""All of a step's adapters are others: the request waits until one of these has no more requests."""
JOIN_COST = 0.05
"""A step has one adapter more. Little more than a tie-break: adapters stay on as few engines as their load allows."""
BOUNDED_LOAD = 1.25
"""`SessionAffinity`: an engine takes at most this multiple of the mean load."""
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 6.4)


@dataclass(frozen=True, slots=True)
class HashChain:
    """Parameters of an engine's block hashes (`proa.blocks`). Engines with equal chains hash equal prompts alike."""

    root: bytes  # hash of model and revision: the parent hash of a prompt's first block
    block_size: int  # tokens


def hash_chain(model: ModelInfo) -> HashChain:
    return HashChain(root_hash(model.model, model.revision), model.block_size)


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """What a policy knows of a request."""

    block_hashes: Sequence[bytes] = ()  # of the prompt's full blocks, in order; empty if the policy does not use them
    chain: HashChain | None = None  # of `block_hashes`; None if these are not computed
    num_prompt_tokens: int = 0  # 0 if `block_hashes` are not computed
    session_id: str | None = None  # the client's own name for its conversation, for session affinity
    lora: Lora | None = None  # the adapter; without a digest, no engine has loaded it yet

    @property
    def num_reusable(self) -> int:
        """How many blocks a cache hit can save: a prompt's last token is always computed, so a full last block is not
        one."""
        return 0 if self.chain is None else max(0, self.num_prompt_tokens - 1) // self.chain.block_size

    @property
    def reusable(self) -> Sequence[bytes]:
        return self.block_hashes[: self.num_reusable]


class LoraState(Protocol):
    """The adapters of an engine."""

    @property
    def has_free_slot(self) -> bool:
        """Whether a step can apply one adapter more than those with requests."""
        ...

    def has(self, lora: Lora) -> bool:
        """Whether it is loaded, or will be soon."""
        ...

    def is_active(self, lora: Lora) -> bool:
        """Whether requests use it, or wait until it is loaded."""
        ...


class Candidate(Protocol):
    """An engine that can take a request."""

    address: str
    load: int  # unfinished requests
    kv_cache_usage: float  # 0 to 1

    @property
    def loras(self) -> LoraState: ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


class Index(Protocol):
    """Which engine has which KV cache blocks: a `TieredIndex`."""

    def match(self, block_hashes: Sequence[bytes]) -> Sequence[tuple[float, Sequence[str]]]:
        """Return (length, addresses) pairs, the longest first: leading blocks of the prompt that an engine saves."""
        ...

    def add_pending(self, address: str, hints: RoutingHints, now: float) -> int:
        """Record that a request is sent. Return how many leading blocks of the prompt the engine need not compute."""
        ...


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
    matched: Iterable[tuple[float, Collection[str]]],
    num_blocks: int,
    weights: Weights,
    rng: random.Random,
    lora: Lora | None = None,
) -> AnyCandidate:
    """Return the candidate with the largest score.

    `matched`: (length, addresses) pairs as `Index.match` returns them, for a prompt of `num_blocks` blocks.
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


class HasLoras(Protocol):
    @property
    def loras(self) -> LoraState: ...


Engine = TypeVar("Engine", bound=HasLoras)


def having_lora(engines: Sequence[Engine], lora: Lora) -> Sequence[Engine]:
    """The engines that have the adapter; all if none has."""
    return [engine for engine in engines if engine.loras.has(lora)] or engines


def lora_cost(state: LoraState, lora: Lora) -> float:
    """From 0 for an engine that runs the adapter to the cost of one that must load it and has no slot."""
    load = 0.0 if state.has(lora) else LOAD_COST
    if state.is_active(lora):
        return load
    return load + (JOIN_COST if state.has_free_slot else WAIT_COST)


WEIGHTS = Weights()


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
        self._turn = rng.randrange(2**16)  # requests so far, from a random number on

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
    """The candidate with the best score of cached prompt blocks, adapters and load; see `best`."""

    name: ClassVar[str] = "prefix"
    needs_hashes: ClassVar[bool] = True

    def __init__(self, index: Index, rng: random.Random, clock: Callable[[], float], weights: Weights) -> None:
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


def make_policy(name: str, index: Index, rng: random.Random, clock: Callable[[], float]) -> Policy:
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
