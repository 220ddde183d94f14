"""Demand: how many requests there are for engines, in this gateway, in others and in the engines."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Protocol

from proa.contract import Role


class Engine(Protocol):
    @property
    def model_name(self) -> str | None:
        """None while there is no session."""
        ...

    @property
    def role(self) -> Role: ...

    @property
    def load(self) -> int:
        """Its unfinished requests, of all gateways."""
        ...


class Demand:
    """`engines`: a live view. All methods must be called in the event loop's thread."""

    def __init__(self, engines: Collection[Engine]) -> None:
        self._engines = engines
        self._here: dict[str, int] = {}  # requests that wait, by model
        self._sessions: dict[str, int] = {}  # those of them that wait for a place in a KV cache
        self._elsewhere: dict[str, Mapping[str, int]] = {}  # by gateway
        self._listeners: set[asyncio.Event] = set()  # one for each `changes` that is iterated
        self._closed = False

    @property
    def waiting_here(self) -> Mapping[str, int]:
        return self._here

    @property
    def num_gateways(self) -> int:
        """The other gateways that are counted."""
        return len(self._elsewhere)

    def set_waiting(self, model: str, count: int) -> None:
        """Set how many requests for a model wait in this gateway, for an engine or its capacity."""
        count += self._sessions.get(model, 0)
        if self._here.get(model, 0) != count:
            self._here[model] = count
            self._notify()

    def add_waiting_session(self, model: str, change: int) -> None:
        """A turn of a conversation begins (1) or ends (-1) to wait for a place in a KV cache."""
        self._sessions[model] = self._sessions.get(model, 0) + change
        self._here[model] = self._here.get(model, 0) + change
        self._notify()

    def set_elsewhere(self, gateway: str, waiting: Mapping[str, int]) -> None:
        """Set how many requests wait in another gateway, by model."""
        self._elsewhere[gateway] = waiting
        self._notify()

    def forget(self, gateway: str) -> None:
        if self._elsewhere.pop(gateway, None) is not None:
            self._notify()

    def of(self, model: str, *, prefill: bool) -> int:
        """The requests for a model: those that wait in gateways, and those that its engines have.

        With `prefill` only those of engines of that role, for which no request waits in a gateway.
        """
        engines = [each for each in self._engines if each.model_name == model]
        in_engines = sum(each.load for each in engines if (each.role is Role.PREFILL) == prefill)
        if prefill:
            return in_engines
        return in_engines + sum(each.get(model, 0) for each in (self._here, *self._elsewhere.values()))

    async def changes(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Yield at once, after each change of what waits, and every `seconds`, until `close`. Changes that come while
        the caller is busy count as one."""
        changed = asyncio.Event()
        self._listeners.add(changed)
        try:
            while not self._closed:
                changed.clear()
                yield
                try:
                    async with asyncio.timeout(seconds):
                        await changed.wait()
                except TimeoutError:
                    pass
        finally:
            self._listeners.discard(changed)

    def close(self) -> None:
        """End all `changes`."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        for changed in self._listeners:
            changed.set()
