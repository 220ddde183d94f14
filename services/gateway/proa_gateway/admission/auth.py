"""API keys: which caller a bearer token stands for. The file of keys is read again whenever it changes.

A presented key is looked up by half of its SHA-256 digest, which takes as long for a thousand keys as for one, and the
whole digest is compared in constant time.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import time
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from proa_gateway.admission.rate_limits import Clock, KeyLimits, Usage
from proa_gateway.errors import InvalidApiKey

LOOK_EVERY = 1.0  # seconds between looks at the file
INDEXED = 16  # bytes of a digest; no two keys share so many
Limit = Annotated[int, Field(ge=1, lt=2**53)]
_log = logging.getLogger(__name__)


class ApiKey(BaseModel):
    """One key of the file: given itself, or as its SHA-256 in hexadecimal. `name` is what metrics and traces show."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    key: Annotated[str, Field(pattern=r"^[\x21-\x7e]+$")] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    max_concurrent_requests: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0  # smaller first
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0  # share among keys of the same priority

    @model_validator(mode="after")
    def _check(self) -> "ApiKey":
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("either key or sha256 must be given")
        return self

    @property
    def digest(self) -> bytes:
        return _digest(self.key.encode()) if self.key is not None else bytes.fromhex(self.sha256 or "")

    @property
    def limits(self) -> KeyLimits:
        return KeyLimits(
            max_concurrent_requests=self.max_concurrent_requests,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    keys: Annotated[list[ApiKey], Field(min_length=1)]


def read_keys(path: Path) -> list[ApiKey]:
    """Raises `ValueError` that says what is wrong with the file, and never what a key is."""
    try:
        keys = _File.model_validate_json(path.read_bytes()).keys
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {where}: {first['msg']}" if where else f"{path}: {first['msg']}") from None
    names = [key.name for key in keys]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{path}: there are two keys by the name {twice!r}")
    if len({key.digest[:INDEXED] for key in keys}) < len(keys):
        raise ValueError(f"{path}: the same key stands there twice")
    return keys


class Caller:
    """Who asks: the entry of the file, which may be another after a rotation, and what has been used of its limits."""

    def __init__(self, key: ApiKey | None, clock: Clock) -> None:
        self.name = key.name if key is not None else ""  # empty: no keys are asked for, everybody is this one
        self.priority = key.priority if key is not None else 0
        self.weight = key.weight if key is not None else 1.0
        self.usage = Usage(key.limits if key is not None else KeyLimits(), clock)

    def change(self, key: ApiKey) -> None:
        self.priority, self.weight = key.priority, key.weight
        self.usage.change(key.limits)


class KeyRing:
    """All callers. Without a file there is one, and no key is asked for."""

    def __init__(self, path: Path | None, *, clock: Clock = time.monotonic) -> None:
        """Raises `ValueError`."""
        self._path = path
        self._clock = clock
        self._anyone = Caller(None, clock)
        self._callers: dict[bytes, tuple[bytes, Caller]] = {}  # digest and caller, by what the digest begins with
        self._seen: tuple[int, ...] | None = None
        if path is not None:
            self._seen = _fingerprint(path)
            self._take(read_keys(path))

    def authenticate(self, authorization: str | None) -> Caller:
        """The header's caller. Raises `InvalidApiKey`."""
        if self._path is None:
            return self._anyone
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidApiKey("An API key is needed, in the header 'Authorization: Bearer KEY'.")
        presented = _digest(key.strip().encode())
        digest, caller = self._callers.get(presented[:INDEXED], (b"", self._anyone))
        # The look-up's time may tell of half a digest, by which nobody can choose a key; the other half it cannot.
        if not hmac.compare_digest(digest, presented):
            raise InvalidApiKey("The API key is not known.")
        return caller

    async def follow(self) -> None:
        """Reads the file again whenever it changes, for ever. One that is wrong leaves the keys as they are."""
        while self._path is not None:
            await asyncio.sleep(LOOK_EVERY)
            fingerprint = await asyncio.to_thread(_fingerprint, self._path)
            if fingerprint == self._seen:
                continue
            self._seen = fingerprint
            try:
                self._take(await asyncio.to_thread(read_keys, self._path))
            except ValueError as error:
                _log.error("the API keys stay as they were: %s", error)

    def _take(self, keys: list[ApiKey]) -> None:
        """A name that stays keeps what it has used."""
        known = {caller.name: caller for _, caller in self._callers.values()}
        callers: dict[bytes, tuple[bytes, Caller]] = {}
        for key in keys:
            caller = known.get(key.name) or Caller(key, self._clock)
            caller.change(key)
            callers[key.digest[:INDEXED]] = key.digest, caller
        self._callers = callers
        _log.info("%d API keys", len(callers))


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    """Another one when the file is, also where a symbolic link on the way to it was changed, as a Secret's mount does.
    None: it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
