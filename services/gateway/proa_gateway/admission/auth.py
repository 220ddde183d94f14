"""API keys: the middleware that requires one, the file that lists them, and the caller that each stands for."""

import asyncio
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.admission.rate_limits import Clock, RateLimiter, RateLimits
from proa_gateway.errors import HostNotAllowed, InvalidApiKey
from proa_gateway.http.errors import ErrorForms, route_path

POLL_INTERVAL = 1.0  # seconds between two checks of the key file
INDEX_BYTES = 16  # of a key's digest
Authenticate = Callable[[Scope, Mapping[bytes, bytes]], "Caller"]
"""From a request's scope and headers. Raises `InvalidApiKey`, `HostNotAllowed`."""
_log = logging.getLogger(__name__)


Role = Literal["user", "operator"]


class ApiKey(RateLimits):
    """An entry of the key file. `name` is shown in metrics and traces. `role`: an operator's key may also call the
    operators' endpoints."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    # Either the key or its digest, in hex. The other one is None.
    key: Annotated[str, Field(pattern=r"^[\x21-\x7e]+$")] | None = Field(default=None, repr=False)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = Field(default=None, repr=False)
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0  # smaller is served first
    role: Role = "user"
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0  # share among keys of the same priority

    @model_validator(mode="after")
    def _check(self) -> "ApiKey":
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("either key or sha256 must be given")
        return self

    @property
    def digest(self) -> bytes:
        return _digest(self.key) if self.key is not None else bytes.fromhex(self.sha256 or "")


class _KeyFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    keys: Annotated[list[ApiKey], Field(min_length=1)]


def read_keys(path: Path) -> list[ApiKey]:
    """Raises `ValueError` with a message that names the fault and contains no key."""
    try:
        keys = _KeyFile.model_validate_json(path.read_bytes()).keys
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {where}: {first['msg']}" if where else f"{path}: {first['msg']}") from None
    names = [key.name for key in keys]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{path}: there are two keys by the name {duplicate!r}")
    if len({key.digest[:INDEX_BYTES] for key in keys}) < len(keys):
        raise ValueError(f"{path}: the same key is listed twice")
    return keys


class Caller:
    """The holder of a named key, whatever its key and limits are at the moment, or of a key without a name. Without
    keys, all requests have the same caller, whose name is empty.

    `owner`: who owns what its requests store. The name of a named key, the digest of one without a name.
    `tenant`: what engines know the caller by, without its name or key. Empty if no key is needed.
    """

    def __init__(
        self,
        name: str = "",
        *,
        owner: str | None = None,
        role: Role = "user",
        separates_cache: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """`separates_cache`: whether its requests share cached prefixes only with each other."""
        self.name = name
        self.role = role
        self._separates_cache = separates_cache
        self.owner = name if owner is None else owner
        self.tenant = hashlib.sha256(self.owner.encode()).hexdigest()[:16] if self.owner else ""
        self.priority = 0  # smaller is served first
        self.weight = 1.0  # share among callers of the same priority
        self.limiter = RateLimiter(RateLimits(), clock)

    def update(self, key: ApiKey) -> None:
        self.priority, self.weight, self.role = key.priority, key.weight, key.role
        self.limiter.set_limits(key)

    def cache_salt(self, requested: str | None) -> str:
        """The salt of the prefix cache for a request of this caller. `requested`: by the client."""
        if not self._separates_cache:
            return requested or ""
        return hashlib.sha256(f"{self.owner}\n{requested or ''}".encode()).hexdigest()


class ApiKeyStore:
    """The callers of a key file, which is reloaded when it changes, and of keys without names and limits. Without any
    no key is required."""

    def __init__(
        self,
        path: Path | None,
        keys: Sequence[str] = (),
        operator_keys: Sequence[str] = (),
        *,
        separates_caches: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """`keys` and `operator_keys`: those without names, of users and of operators. `separates_caches`: no key's
        requests share cached prefixes with another's. Raises `ValueError`."""
        self._path = path
        self._new_caller = partial(Caller, separates_cache=separates_caches, clock=clock)
        roles: dict[str, Role] = {**dict.fromkeys(keys, "user"), **dict.fromkeys(operator_keys, "operator")}
        self.needs_key = path is not None or bool(roles)
        self._anonymous = Caller(role="operator", clock=clock)  # of requests where no key is needed
        # first bytes of a digest -> digest, caller
        self._unnamed = {
            (digest := _digest(key))[:INDEX_BYTES]: (
                digest,
                self._new_caller(owner=f"sha256:{digest.hex()}", role=role),
            )
            for key, role in roles.items()
        }
        # These and those of the key file's last valid content.
        self._callers: dict[bytes, tuple[bytes, Caller]] = self._unnamed
        self._fingerprint: tuple[int, ...] | None = None  # of the key file when it was last read, valid or not
        if path is not None:
            self._fingerprint = _fingerprint(path)
            self._load(read_keys(path))

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller of an `Authorization` header. Raises `InvalidApiKey`."""
        if not self.needs_key:
            return self._anonymous
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidApiKey("An API key is needed, in the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        presented = _digest(key.strip())
        digest, caller = self._callers.get(presented[:INDEX_BYTES], (b"", self._anonymous))
        # The look-up's duration may reveal the first half of a digest, which helps no one to find a key.
        if not hmac.compare_digest(digest, presented):
            raise InvalidApiKey("The API key is not known.")
        return caller

    async def watch(self) -> None:
        """Reload the key file whenever it changes, until cancelled. An invalid file is logged and the current keys
        are kept."""
        while self._path is not None:
            await asyncio.sleep(POLL_INTERVAL)
            fingerprint = await asyncio.to_thread(_fingerprint, self._path)
            if fingerprint == self._fingerprint:
                continue
            try:
                self._load(await asyncio.to_thread(read_keys, self._path))
            except ValueError as error:
                _log.error("API keys not reloaded, the current ones are kept: %s", error)
            self._fingerprint = fingerprint  # not after other exceptions: the file is read again

    def _load(self, keys: list[ApiKey]) -> None:
        """A caller whose name stays keeps what it has used of its limits."""
        known = {caller.name: caller for _, caller in self._callers.values()}
        callers = dict(self._unnamed)
        for key in keys:
            caller = known.get(key.name) or self._new_caller(key.name)
            caller.update(key)
            callers[key.digest[:INDEX_BYTES]] = key.digest, caller
        self._callers = callers
        _log.info("loaded %d API keys", len(callers))


class ApiKeyMiddleware:
    """Sets `caller` in a request's state, and adds rate limit headers to its response. Reads no request body.

    `public_paths` need no key, and their requests have no caller.
    """

    def __init__(
        self, app: ASGIApp, authenticate: Authenticate, public_paths: frozenset[str], error_forms: ErrorForms
    ) -> None:
        self._app = app
        self._error_forms = error_forms
        self._authenticate = authenticate
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in self._public_paths:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._authenticate(scope, dict(scope["headers"]))
        except (InvalidApiKey, HostNotAllowed) as error:
            scope["state"]["error_type"] = error.code
            await self._error_forms.response(scope, error)(scope, receive, send)
            return
        scope["state"]["caller"] = caller

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = caller.limiter.headers().items()
                message["headers"] = [*message["headers"], *((n.encode(), v.encode()) for n, v in limits)]
            await send(message)

        await self._app(scope, receive, send_with_limits if caller.name else send)


def authorization(headers: Mapping[bytes, bytes]) -> str | None:
    """The `Authorization` header, or one made from the header in which Anthropic's clients send the key."""
    if header := headers.get(b"authorization"):
        return header.decode("latin-1")
    key = headers.get(b"x-api-key")
    return None if key is None else f"Bearer {key.decode('latin-1')}"


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    """Changes with the file, also where a symbolic link to it is replaced as in a mounted Secret. None: no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
