"""State of the Responses API: the responses that are kept, and the tasks that generate some in the background."""

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """JSON. `input_items`: all items that the model was given, those of previous responses included."""

    response: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items)


@dataclass(slots=True, eq=False)
class _Share:
    """The responses of one owner. The last one was used last."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0  # of `responses`

    def add(self, id: str, stored: StoredResponse) -> None:
        self.responses[id] = stored
        self.num_bytes += stored.num_bytes

    def remove(self, id: str) -> None:
        self.num_bytes -= self.responses.pop(id).num_bytes


class ResponseStore:
    """Keeps the responses that were used last, up to a number and a size. Owners do not see each other's.

    A full store drops a response of the owner that has the most of what is short. So each of N owners can keep an Nth
    of the store, whatever the others store.
    """

    def __init__(self, *, max_responses: int, max_bytes: int, max_response_bytes: int) -> None:
        """`max_response_bytes`: of one response with its input."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_response_bytes = min(max_response_bytes, max_bytes)
        self._shares: dict[str, _Share] = {}  # by owner; none is empty

    def fits(self, num_bytes: int) -> bool:
        """Whether one response may have so many bytes, with its input."""
        return num_bytes <= self._max_response_bytes

    def put(self, owner: str, id: str, stored: StoredResponse) -> None:
        """Replaces the response with this id, if there is one. One that is too large is not kept."""
        self.delete(owner, id)
        if not self.fits(stored.num_bytes):
            return
        self._shares.setdefault(owner, _Share()).add(id, stored)
        while sum(share.num_bytes for share in self._shares.values()) > self._max_bytes:
            self._drop_oldest(max(self._shares, key=lambda each: self._shares[each].num_bytes))
        while sum(len(share.responses) for share in self._shares.values()) > self._max_responses:
            self._drop_oldest(max(self._shares, key=lambda each: len(self._shares[each].responses)))

    def get(self, owner: str, id: str) -> StoredResponse | None:
        share = self._shares.get(owner)
        if share is None or id not in share.responses:
            return None
        share.responses.move_to_end(id)
        return share.responses[id]

    def delete(self, owner: str, id: str) -> None:
        share = self._shares.get(owner)
        if share is not None and id in share.responses:
            self._remove(owner, id)

    def _drop_oldest(self, owner: str) -> None:
        self._remove(owner, next(iter(self._shares[owner].responses)))

    def _remove(self, owner: str, id: str) -> None:
        share = self._shares[owner]
        share.remove(id)
        if not share.responses:
            del self._shares[owner]


class BackgroundTasks:
    """Tasks by a key. `close` ends those that still run."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}  # those that have not ended

    def __contains__(self, key: Hashable) -> bool:
        """Whether the task has not ended."""
        return key in self._tasks

    def start(self, key: Hashable, work: Coroutine[Any, Any, None]) -> None:
        """`key` must not be in use."""
        assert key not in self._tasks
        self._tasks[key] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key))

    async def cancel(self, key: Hashable) -> None:
        """Returns when the task has ended."""
        if task := self._tasks.get(key):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
