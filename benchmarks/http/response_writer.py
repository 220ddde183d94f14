"""CPU time of one SSE event in the gateway's `ResponseWriter`, and of the usual ways to send it.

The transport does nothing, so this is the cost between the event's bytes and the transport. 64 streams get an event
each, then the event loop runs; the fastest of 25 rounds counts.

    python -m benchmarks.http.response_writer
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import uvloop
from fastapi import FastAPI, Request, Response
from starlette.types import Message, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from proa_gateway.http.errors import ErrorForms, error_handlers
from proa_gateway.http.streaming import CONNECTION, ResponseWriter, WriterResponse

EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" one"}}]}\n\n'
NUM_STREAMS, NUM_STEPS, NUM_ROUNDS = 64, 300, 25
Write = Callable[[bytes], Awaitable[None] | None]


class Stream:
    """A response that has begun, on a transport that does nothing."""

    def __init__(self) -> None:
        self.transport = self
        self.writer: ResponseWriter | None = None
        self.wrapped_send: Send | None = None
        transport: Any = self
        self.cycle = RequestResponseCycle(
            scope=cast(Any, {"method": "GET"}),
            transport=transport,
            flow=FlowControl(transport),
            logger=cast(Any, None),
            access_logger=cast(Any, None),
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=lambda: None,
        )

    def write(self, data: bytes) -> None: ...

    async def open(self) -> None:
        """Answer a request through FastAPI, until cancelled."""
        app = FastAPI(exception_handlers=error_handlers(lambda request, status, error_type: None, ErrorForms()))  # type: ignore[arg-type]

        async def respond(writer: ResponseWriter) -> None:
            await writer.start_events()
            self.wrapped_send = writer._send
            await asyncio.Event().wait()

        @app.get("/")
        async def route(request: Request) -> Response:
            return WriterResponse(respond)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], CONNECTION: self}
        await app(scope, receive, cast(Send, self.cycle.send))


async def main() -> None:
    streams = [Stream() for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(stream.open()) for stream in streams]
    while not all(stream.wrapped_send for stream in streams):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    sends = [cast(Send, stream.cycle.send) for stream in streams]
    wrapped = [cast(Send, stream.wrapped_send) for stream in streams]

    def queued(send: Send) -> Write:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        tasks.append(asyncio.create_task(pump(queue, send)))
        return queue.put_nowait

    print(f"ResponseWriter:                {await measure([cast(Any, s.writer).write for s in streams]):.2f} µs/event")
    print(f"uvicorn's send:                {await measure([awaited(send) for send in sends]):.2f} µs/event")
    print(f"uvicorn's send, wrapped:       {await measure([awaited(send) for send in wrapped]):.2f} µs/event")
    print(f"queue, task and wrapped send:  {await measure([queued(send) for send in wrapped]):.2f} µs/event")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def awaited(send: Send) -> Write:
    return lambda event: send({"type": "http.response.body", "body": event, "more_body": True})


async def pump(queue: "asyncio.Queue[bytes]", send: Send) -> None:
    while True:
        await send({"type": "http.response.body", "body": await queue.get(), "more_body": True})


async def measure(writes: list[Write]) -> float:
    """Microseconds of CPU for one event."""
    fastest = float("inf")
    for _ in range(NUM_ROUNDS):
        start = time.thread_time()
        for _ in range(NUM_STEPS):
            for write in writes:
                if (sending := write(EVENT)) is not None:
                    await sending
            await asyncio.sleep(0)
        fastest = min(fastest, time.thread_time() - start)
    return fastest / NUM_STEPS / len(writes) * 1e6


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    uvloop.run(main())
