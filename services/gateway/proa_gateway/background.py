"""BackgroundTasks: work that goes on after the response to its request."""

import asyncio
from collections.abc import Coroutine, Hashable
from typing import Any


class BackgroundTasks:
    """Tasks by a key. `close` ends those that still run."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

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
