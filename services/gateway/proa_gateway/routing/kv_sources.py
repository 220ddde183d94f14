"""KV sources: whether an engine fetches blocks of a prompt from another engine, and from which one.

Decisions only: `proa_gateway.engines.kv_exchange` collects what they need and applies them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

FETCH_SECONDS = 0.01
"""Time of a fetch beside that of its bytes, and of loading the blocks. Measured with the built-in model on two CPU
cores: fetches of 80 to 976 tokens took 2.5 to 13 ms."""
MAX_SHARE = 0.7
"""A fetch must take less than this share of the time of computing the same blocks: it may fail, and occupies two
engines."""
MEASUREMENT_SECONDS = 60.0
"""Time after which a measured rate is forgotten, so that a pair whose fetches were slow or failed is tried again."""
MAX_PAIRS = 10_000
_LAST_WEIGHT = 0.5  # of the last fetch in a pair's mean

Pair = tuple[str, str]
"""Addresses of the engine that sends blocks and of the one that fetches them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine that is about to get a request. `prefill_rate`: tokens per second; 0: not known yet."""

    block_size: int  # tokens
    block_bytes: int  # of one block, on all ranks
    num_cached: int  # leading blocks of the prompt
    num_waiting_tokens: int  # of the requests in its queue
    prefill_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An engine that has blocks of the request's prompt. `rate`: bytes per second to the target; 0: fetches fail."""

    address: str
    num_blocks: int  # leading blocks of the prompt
    rate: float
    load: int  # unfinished requests
    is_draining: bool = False  # its blocks will be lost


def choose_source(target: Target, sources: Iterable[Source]) -> Source | None:
    """Return the source with the most blocks, of those from which fetching is faster than computing.

    Between equal ones it is an engine that drains, then the one with the fewest unfinished requests.
    """
    ordered = sorted(sources, key=lambda one: (-one.num_blocks, not one.is_draining, one.load))
    return next((one for one in ordered if is_faster(target, one)), None)


def is_faster(target: Target, source: Source) -> bool:
    """Return whether the target gets the blocks that it lacks sooner from the source than by computing them.

    While the time of computing is not known, only the blocks of an engine that drains are fetched.
    """
    num_blocks = source.num_blocks - target.num_cached
    if num_blocks <= 0 or not source.rate:
        return False
    if not target.prefill_rate:
        return source.is_draining
    seconds = FETCH_SECONDS + num_blocks * target.block_bytes / source.rate
    return seconds < MAX_SHARE * (num_blocks * target.block_size + target.num_waiting_tokens) / target.prefill_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefiller:
    """An engine that may compute a prompt."""

    num_queued_tokens: int  # of prompts that it computes first
    step_tokens: int  # that it computes in one step, at most
    rate: float  # tokens per second; 0: not known yet
    load: int  # unfinished requests


def remote_wait(
    own: Prefiller, remote: Prefiller, *, num_tokens: int, num_bytes: int, bandwidth: float
) -> float | None:
    """Return the seconds until a prefill engine has computed the first blocks of a prompt. None if the engine that
    generates should compute the prompt itself.

    It should if it had computed the prompt before the other one begins, or before the blocks were sent. While a rate is
    not known, the prefill engine is used if it has no more requests.

    `num_tokens`: tokens of the prompt that the engine that generates lacks. `num_bytes`: size of their blocks.
    `bandwidth`: bytes per second.
    """
    if not own.rate or not remote.rate:
        return 0.0 if remote.load <= own.load else None
    queue = remote.num_queued_tokens / remote.rate
    if max(queue, num_bytes / bandwidth) >= (own.num_queued_tokens + num_tokens) / own.rate:
        return None
    return queue + min(num_tokens, remote.step_tokens) / remote.rate


class FetchRates:
    """Bytes per second of each pair of engines: an exponentially weighted mean of its recent fetches, or `expected`."""

    def __init__(self, expected: float, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._expected = expected
        self._clock = clock
        self._measured: OrderedDict[Pair, tuple[float, float]] = OrderedDict()  # rate and time, the oldest first

    def get(self, pair: Pair) -> float:
        rate, measured_at = self._measured.get(pair, (self._expected, 0.0))
        return rate if self._clock() - measured_at < MEASUREMENT_SECONDS else self._expected

    def add(self, pair: Pair, num_bytes: int, seconds: float, *, waited: bool = False) -> None:
        """Record a fetch. `waited`: for blocks that the source had to compute first, so that its rate is only a lower
        bound."""
        rate, before = num_bytes / max(seconds - FETCH_SECONDS, seconds / 4, 1e-6), self.get(pair)
        if rate > before or not waited:
            self._set(pair, _LAST_WEIGHT * rate + (1 - _LAST_WEIGHT) * before)

    def add_failure(self, pair: Pair) -> None:
        """Record a fetch that ended with an error. The pair is avoided until this is forgotten."""
        self._set(pair, 0.0)

    def _set(self, pair: Pair, rate: float) -> None:
        self._measured[pair] = rate, self._clock()
        self._measured.move_to_end(pair)
        if len(self._measured) > MAX_PAIRS:
            self._measured.popitem(last=False)


def common_length(block_hashes: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Return how many leading blocks two prompts share. A block's hash covers all blocks before it."""
    low, high = 0, min(len(block_hashes), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if block_hashes[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
