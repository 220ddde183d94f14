"""Limits of one API key: requests at once, requests a minute, tokens a minute. Pure: the clock is handed in.

A minute's worth may be spent at once and refills evenly. Tokens are taken when a request's prompt is known, with the
output that is expected, and settled at the end: what was not used comes back, what was used beyond is owed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from proa_gateway.errors import RateLimited

Clock = Callable[[], float]  # seconds, never going back


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """None: no limit."""

    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Bucket:
    """A minute's worth of something. The level goes below zero where more is taken than is there."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._seen = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._seen) * self.per_minute / 60)
        self._seen = now
        return self._level

    def take(self, amount: float) -> None:
        """Negative amounts are given back."""
        self._level = min(self.per_minute, self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """Zero where it is there now. Who wants more than a minute's worth waits for a full bucket."""
        return max(0.0, (min(amount, self.per_minute) - self.level) * 60 / self.per_minute)

    def resized(self, per_minute: int | None) -> "Bucket | None":
        """Another limit from now on; what has been used stays used."""
        if per_minute is None:
            return None
        bucket = Bucket(per_minute, self._clock)
        bucket.take(self.per_minute - self.level)
        return bucket


class Usage:
    """What one key uses, and whether it may use more. `lease` stands for a request's beginning and end."""

    def __init__(self, limits: KeyLimits, clock: Clock) -> None:
        self.num_requests = 0
        self._clock = clock
        self._limits = limits
        self._requests = self._bucket(None, limits.requests_per_minute)
        self._tokens = self._bucket(None, limits.tokens_per_minute)

    def change(self, limits: KeyLimits) -> None:
        """Other limits from now on; what has been used stays used."""
        if limits != self._limits:
            self._limits = limits
            self._requests = self._bucket(self._requests, limits.requests_per_minute)
            self._tokens = self._bucket(self._tokens, limits.tokens_per_minute)

    def lease(self) -> "Lease":
        """Takes one request. Raises `RateLimited`."""
        most = self._limits.max_concurrent_requests
        if most is not None and self.num_requests >= most:
            raise RateLimited(f"This API key is at its limit of {most} concurrent requests.", kind="requests")
        if self._requests is not None:
            _check(self._requests, 1, "requests")
            self._requests.take(1)
        self.num_requests += 1
        return Lease(self)

    def reserve(self, num_tokens: int) -> None:
        """Takes tokens. Raises `RateLimited`."""
        if self._tokens is not None:
            _check(self._tokens, num_tokens, "tokens")
            self._tokens.take(num_tokens)

    def end(self, reserved: int, used: int) -> None:
        """A request is over; these are the tokens that it took and those that it needed."""
        self.num_requests -= 1
        if self._tokens is not None:
            self._tokens.take(used - reserved)

    def headers(self) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*`, for the limits that there are."""
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level)))
                headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.seconds_until(bucket.per_minute))
        return headers

    def _bucket(self, old: Bucket | None, per_minute: int | None) -> Bucket | None:
        if old is not None:
            return old.resized(per_minute)
        return None if per_minute is None else Bucket(per_minute, self._clock)


class Lease:
    """One request's use. As a context manager it ends with the request; `used` is set before, where tokens were."""

    __slots__ = ("_reserved", "_usage", "used")

    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self._reserved = 0
        self.used = 0

    def reserve(self, num_tokens: int) -> None:
        """Raises `RateLimited`."""
        self._usage.reserve(num_tokens)
        self._reserved += num_tokens

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exc: object) -> None:
        self._usage.end(self._reserved, self.used)


def _check(bucket: Bucket, amount: int, kind: str) -> None:
    seconds = bucket.seconds_until(amount)
    if seconds > 0:
        message = f"This API key is at its limit of {bucket.per_minute} {kind} a minute. Try again in {seconds:.1f} s."
        raise RateLimited(message, kind=kind, retry_after=math.ceil(seconds))


def _duration(seconds: float) -> str:
    """`6m12s`, `1.5s`: as OpenAI writes it."""
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
