"""Compiled grammars, and how much memory they hold.

All matchers of a compiled grammar share one lexer, which llguidance extends when an output needs more of its states. It
tells neither the lexer's bytes nor its states, and the allocator's counters include what other threads do. So bytes are
estimated by the processor time that was spent on the lexer: with llguidance 1.9.1 and 49,000 tokens, hostile regular
expressions took 30 to 90 MB for each second of a Zen 5 core, in masks of 1 to 5 ms. Masks of JSON schemas, whose lexers
hardly grow, take 0.02 ms, and 0.3 ms at the 99th percentile: what a mask takes at most is not counted.
"""

import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Protocol

from llguidance import LLMatcher

BYTES_PER_SECOND = 100_000_000
BASE_BYTES = 100_000  # of a small grammar
MASK_SECONDS = 0.00025  # processor time of a mask that is not counted
CACHE_BYTES = 256 * 2**20
LARGEST = 4  # a grammar may hold this part of the cache at most
MAX_ENTRIES = 4096


class CompiledGrammar:
    """A grammar at its beginning. Compiling it took `seconds` of processor time."""

    __slots__ = ("__weakref__", "_matcher", "_seconds", "is_failed")

    def __init__(self, matcher: LLMatcher, seconds: float = 0.0) -> None:
        self._matcher = matcher
        self._seconds = seconds
        self.is_failed = False  # whether the lexer is at a limit of llguidance: it fails for all its matchers

    @property
    def num_bytes(self) -> int:
        """Estimated bytes. They grow while the grammar's matchers run."""
        return BASE_BYTES + int(self._seconds * BYTES_PER_SECOND)

    def start(self) -> LLMatcher:
        """Return a matcher at the grammar's beginning."""
        return self._matcher.deep_copy()  # it shares the lexer in spite of the name

    def count_masks(self, seconds: float, number: int = 1) -> None:
        """Count the states that `number` masks may have added to the lexer. Each took `seconds` of processor time."""
        self._seconds += number * max(0.0, seconds - MASK_SECONDS)


class Refusal(Protocol):
    """Why a text is no grammar."""

    @property
    def message(self) -> str: ...


Outcome = CompiledGrammar | Refusal


@dataclass(frozen=True, slots=True)
class _Entry:
    outcome: Outcome
    tenant: str

    @property
    def num_bytes(self) -> int:
        return self.outcome.num_bytes if isinstance(self.outcome, CompiledGrammar) else len(self.outcome.message)


class GrammarCache:
    """What texts were compiled to, at most `max_bytes` together. Not thread-safe.

    The tenant whose entries hold most loses its least recently used one first, so that no tenant can evict those of all
    others. An evicted grammar lives while requests use it, and counts until then.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._alive: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of all grammars that are cached or in use."""
        return sum(grammar.num_bytes for grammar in self._alive)

    @property
    def is_full(self) -> bool:
        """Whether running requests use so much that evicting makes no room."""
        cached = sum(each.num_bytes for each in self._entries.values() if isinstance(each.outcome, CompiledGrammar))
        return self.num_bytes - cached > self._max_bytes

    def get(self, text: str) -> Outcome | None:
        """Return None also for a grammar that has failed or grown too large: it is to be compiled anew."""
        entry = self._entries.get(text)
        if entry is None:
            return None
        if self._is_spent(entry.outcome):
            return None
        self._entries.move_to_end(text)
        return entry.outcome

    def add(self, text: str, tenant: str, outcome: Outcome) -> None:
        """Keep what `text` was compiled to for `tenant`. Call it where freeing large objects may take 0.2 s."""
        if isinstance(outcome, CompiledGrammar):
            self._alive.add(outcome)
        self._entries[text] = _Entry(outcome, tenant)
        self._entries.move_to_end(text)
        for key in [key for key, entry in self._entries.items() if self._is_spent(entry.outcome)]:
            del self._entries[key]
        held: Counter[str] = Counter()
        for key, entry in self._entries.items():
            held[entry.tenant] += entry.num_bytes + len(key)
        while len(self._entries) > MAX_ENTRIES or sum(held.values()) > self._max_bytes:
            (largest, _), *_ = held.most_common(1)
            key = next(key for key, entry in self._entries.items() if entry.tenant == largest)
            held[largest] -= self._entries.pop(key).num_bytes + len(key)

    def _is_spent(self, outcome: Outcome) -> bool:
        if not isinstance(outcome, CompiledGrammar):
            return False
        return outcome.is_failed or outcome.num_bytes > self._max_bytes // LARGEST
