"""The server's side of ASGI and of the client's connection, for tests without a socket."""

import asyncio
import json
from typing import Any

from starlette.types import Message

from proa_gateway.http.streaming import ResponseWriter


class AsgiServer:
    """`send` and `receive` of a server, and the `Connection` of its responses. The client reads nothing between
    `stop_reading` and `start_reading`; `disconnect` ends the connection."""

    def __init__(self, body: bytes = b"") -> None:
        self.status: int | None = None
        self.sent: list[bytes] = []
        self.transport = self
        self.writer: ResponseWriter | None = None
        self._reading = asyncio.Event()
        self._reading.set()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(self, message: Message) -> None:
        await self._reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.sent.append(message["body"])

    def write(self, data: bytes) -> None:
        """The transport's: every write is one chunk of an HTTP/1.1 body."""
        body = data.partition(b"\r\n")[2].removesuffix(b"\r\n")
        assert data == b"%x\r\n%b\r\n" % (len(body), body)
        self.sent.append(body)

    def stop_reading(self) -> None:
        self._reading.clear()
        if self.writer is not None:
            self.writer.pause()

    def start_reading(self) -> None:
        self._reading.set()
        if self.writer is not None:
            self.writer.resume()

    async def receive(self) -> Message:
        return await self._incoming.get()

    def disconnect(self) -> None:
        if self.writer is not None:
            self.writer.pause()
        self._incoming.put_nowait({"type": "http.disconnect"})

    def events(self) -> list[Any]:
        parts = b"".join(self.sent).split(b"\n\n")
        return [json.loads(part.removeprefix(b"data: ")) for part in parts if part]
