"""The server's side of ASGI, for tests without a socket."""

import asyncio
import json
from typing import Any

from starlette.types import Message


class AsgiServer:
    """`send` and `receive` of a server. `reading` is cleared while the client reads nothing; `disconnect()` ends the
    connection."""

    def __init__(self, body: bytes = b"") -> None:
        self.status: int | None = None
        self.sent: list[bytes] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(self, message: Message) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.sent.append(message["body"])

    async def receive(self) -> Message:
        return await self._incoming.get()

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    def events(self) -> list[Any]:
        parts = b"".join(self.sent).split(b"\n\n")
        return [json.loads(part.removeprefix(b"data: ")) for part in parts if part]
