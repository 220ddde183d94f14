"""Background tasks that end only when they are cancelled: after an exception they run again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

FIRST_PAUSE = 1.0  # seconds, doubled each time that a task fails soon after it was started
LAST_PAUSE = 60.0
_log = logging.getLogger(__name__)


async def keep_running(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Await `work()` until it returns. After an exception, which is logged with `what` the task does, wait and call it
    again."""
    loop = asyncio.get_running_loop()
    pause = FIRST_PAUSE
    while True:
        started = loop.time()
        try:
            # A task of its own: each message that `work` awaits would resume this coroutine too.
            return await asyncio.ensure_future(work())
        except Exception:
            if loop.time() - started > LAST_PAUSE:
                pause = FIRST_PAUSE
            _log.exception("%s failed, trying again in %.0f s", what, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)
