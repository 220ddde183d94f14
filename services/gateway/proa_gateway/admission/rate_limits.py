"""Rate limits of one API key: concurrent requests, and token buckets of requests and tokens per minute.

A bucket holds one minute's limit and refills evenly. A request reserves the tokens of its prompt and expected output
and settles them when it ends: unused tokens return, tokens used beyond the reservation are taken from the bucket.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from proa_gateway.errors import RateLimited

Clock = Callable[[], float]  # seconds, monotonic
Limit = Annotated[int, Field(ge=1, lt=2**53)]


class RateLimits(BaseModel):
    """None: no limit."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    max_concurrent_requests: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


class TokenBucket:
    """The level is negative while more has been taken than the bucket held."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)  # as of `_updated`
        self._updated = clock()  # by the clock

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._updated) * self.per_minute / 60)
        self._updated = now
        return self._level

    def take(self, amount: float) -> None:
        """A negative amount is returned to the bucket."""
        self._level = min(self.per_minute, self.level - amount)

    def reserve(self, amount: int, kind: str) -> None:
        """Take an amount that the bucket holds. `kind`: of what is limited. Raises `RateLimited`."""
        seconds = self.seconds_until(amount)
        if seconds > 0:
            message = (
                f"This API key is at its limit of {self.per_minute} {kind} a minute. Try again in {seconds:.1f} s."
            )
            raise RateLimited(message, kind=kind, retry_after=math.ceil(seconds))
        self.take(amount)

    def seconds_until(self, amount: float) -> float:
        """Time until the bucket holds the amount, or is full where the amount is larger than the bucket."""
        return max(0.0, (min(amount, self.per_minute) - self.level) * 60 / self.per_minute)


class RateLimiter:
    """What one key has used of its limits."""

    def __init__(self, limits: RateLimits, clock: Clock) -> None:
        self.num_requests = 0  # that have not ended
        self._clock = clock
        self._requests: TokenBucket | None = None  # like `tokens`, of requests
        self.tokens: TokenBucket | None = None  # None: no limit
        self.set_limits(limits)

    def set_limits(self, limits: RateLimits) -> None:
        """Change the limits; what has been used stays used."""
        self._max_requests = limits.max_concurrent_requests
        self._requests = self._bucket(self._requests, limits.requests_per_minute)
        self.tokens = self._bucket(self.tokens, limits.tokens_per_minute)

    @contextmanager
    def acquire(self) -> Iterator["Lease"]:
        """Count one request in this context, and its tokens at the end. Raises `RateLimited`."""
        limit = self._max_requests
        if limit is not None and self.num_requests >= limit:
            raise RateLimited(f"This API key is at its limit of {limit} concurrent requests.", kind="requests")
        if self._requests is not None:
            self._requests.reserve(1, "requests")
        self.num_requests += 1
        lease = Lease(self)
        try:
            yield lease
        finally:
            self.num_requests -= 1
            if self.tokens is not None:
                self.tokens.take(lease.used - lease.reserved)

    def headers(self) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*` headers for the limits that are set."""
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level)))
                headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.seconds_until(bucket.per_minute))
        return headers

    def _bucket(self, old: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        bucket = TokenBucket(per_minute, self._clock)
        if old is not None:
            bucket.take(old.per_minute - old.level)
        return bucket


@dataclass(slots=True, eq=False)
class Lease:
    """One request's use of a key's limits. Set `used` before it ends, if tokens were used."""

    limiter: RateLimiter
    reserved: int = 0  # tokens
    used: int = 0  # tokens

    def reserve(self, num_tokens: int) -> None:
        """Take tokens until the request ends. Raises `RateLimited`."""
        if self.limiter.tokens is not None:
            self.limiter.tokens.reserve(num_tokens, "tokens")
        self.reserved += num_tokens


def _duration(seconds: float) -> str:
    """Return the time in OpenAI's format: `6m12s`, `1.5s`."""
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
