"""Cable: a TCP proxy that can stop forwarding without FIN or RST, as after a power failure.

The kernel still acknowledges what a sender sends, which it does not notice.
"""

import asyncio
from contextlib import suppress


class Cable:
    """Forwards connections from `address` to `target`. `cut` stops all forwarding, `mend` resumes it."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._intact = asyncio.Event()
        self._intact.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> "Cable":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1")
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._intact.clear()

    def mend(self) -> None:
        """Data sent since `cut` is forwarded now."""
        self._intact.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            try:
                while data := await source.read(65536):
                    await self._intact.wait()
                    sink.write(data)
                    await sink.drain()
                await self._intact.wait()
            finally:
                sink.close()
