"""Rate limits of one API key: concurrent requests, and token buckets of requests and tokens per minute.

A bucket holds one minute's limit and refills evenly. A request reserves the tokens of its prompt and expected output
and settles them when it ends: unused tokens return, tokens used beyond the reservation are taken from the bucket.
"""

import math
from collections.abc import Callable
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
        self._level = float(per_minute)
        self._updated = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._updated) * self.per_minute / 60)
        self._updated = now
        return self._level

    def take(self, amount: float) -> None:
        """A negative amount is returned to the bucket."""
        self._level = min(self.per_minute, self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """Time until the bucket holds the amount, or is full where the amount is larger than the bucket."""
        return max(0.0, (min(amount, self.per_minute) - self.level) * 60 / self.per_minute)


class RateLimiter:
    """What one key has used of its limits. `acquire` begins a request, the lease ends it."""

    def __init__(self, limits: RateLimits, clock: Clock) -> None:
        self.num_requests = 0
        self._clock = clock
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.set_limits(limits)

    def set_limits(self, limits: RateLimits) -> None:
        """Change the limits; what has been used stays used."""
        self._max_requests = limits.max_concurrent_requests
        self._requests = self._bucket(self._requests, limits.requests_per_minute)
        self._tokens = self._bucket(self._tokens, limits.tokens_per_minute)

    def acquire(self) -> "Lease":
        """Count one request. Raises `RateLimited`."""
        limit = self._max_requests
        if limit is not None and self.num_requests >= limit:
            raise RateLimited(f"This API key is at its limit of {limit} concurrent requests.", kind="requests")
        _take(self._requests, 1, "requests")
        self.num_requests += 1
        return Lease(self)

    def reserve(self, num_tokens: int) -> None:
        """Take tokens. Raises `RateLimited`."""
        _take(self._tokens, num_tokens, "tokens")

    def release(self, reserved: int, used: int) -> None:
        """End a request that reserved and used so many tokens."""
        self.num_requests -= 1
        if self._tokens is not None:
            self._tokens.take(used - reserved)

    def headers(self) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*` headers for the limits that are set."""
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
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


class Lease:
    """One request's use of a key's limits, until the context manager exits. Set `used` before, if tokens were used."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._reserved = 0
        self.used = 0

    def reserve(self, num_tokens: int) -> None:
        """Raises `RateLimited`."""
        self._limiter.reserve(num_tokens)
        self._reserved += num_tokens

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exc: object) -> None:
        self._limiter.release(self._reserved, self.used)


def _take(bucket: TokenBucket | None, amount: int, kind: str) -> None:
    if bucket is None:
        return
    seconds = bucket.seconds_until(amount)
    if seconds > 0:
        message = f"This API key is at its limit of {bucket.per_minute} {kind} a minute. Try again in {seconds:.1f} s."
        raise RateLimited(message, kind=kind, retry_after=math.ceil(seconds))
    bucket.take(amount)


def _duration(seconds: float) -> str:
    """Return the time in OpenAI's format: `6m12s`, `1.5s`."""
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
