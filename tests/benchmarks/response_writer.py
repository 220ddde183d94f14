"""CPU time of one SSE event in the gateway's `ResponseWriter`, and of the usual ways to send it.

The server's `send` does nothing, so this is only the cost between the event's bytes and the server. 64 streams get an
event each, then the event loop runs; the fastest of 25 rounds counts.

    PYTHONPATH=tests python tests/benchmarks/response_writer.py
"""

import asyncio
import time
from collections.abc import Callable

import uvloop
from fastapi import FastAPI, Request, Response
from starlette.types import Message, Send

from proa_gateway.http import error_handlers
from proa_gateway.streaming import ResponseWriter, ServerSendMiddleware, WriterResponse

EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" one"}}]}\n\n'
NUM_STREAMS, NUM_STEPS, NUM_ROUNDS = 64, 300, 25
Write = Callable[[bytes], None]


async def main() -> None:
    sends, streams = await open_streams()
    wrapped = [send for send, _ in sends]
    server = [send for _, send in sends]
    tasks: list[asyncio.Task[None]] = []

    def queued(send: Send) -> Write:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        tasks.append(asyncio.create_task(pump(queue, send)))
        return queue.put_nowait

    print(f"ResponseWriter:                    {await measure(list(map(stepped, server))):.2f} µs/event")
    print(f"the same over the wrapped send:    {await measure(list(map(stepped, wrapped))):.2f} µs/event")
    print(f"queue and task:                    {await measure(list(map(queued, server))):.2f} µs/event")
    print(f"queue and task, wrapped send:      {await measure(list(map(queued, wrapped))):.2f} µs/event")
    for task in [*tasks, *streams]:
        task.cancel()
    await asyncio.gather(*tasks, *streams, return_exceptions=True)


async def open_streams() -> tuple[list[tuple[Send, Send]], list[asyncio.Task[None]]]:
    """The application's `send` and the server's, for each stream that the returned tasks keep open."""
    app = FastAPI(exception_handlers=error_handlers(lambda request, status, error_type: None))  # type: ignore[arg-type]
    writers: list[ResponseWriter] = []

    async def respond(writer: ResponseWriter) -> None:
        await writer.start_events(lambda: None, write_timeout=5)
        writers.append(writer)
        await asyncio.Event().wait()

    @app.get("/")
    async def route(request: Request) -> Response:
        return WriterResponse(respond)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    asgi = ServerSendMiddleware(app)
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    tasks = [asyncio.create_task(asgi(dict(scope), receive, send)) for _ in range(NUM_STREAMS)]
    while len(writers) < NUM_STREAMS:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return [(writer._send, writer._server_send) for writer in writers], tasks


def stepped(send: Send) -> Write:
    writer = ResponseWriter(send, send)
    writer.blocked = False
    return writer.write


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
                write(EVENT)
            await asyncio.sleep(0)
        fastest = min(fastest, time.thread_time() - start)
    return fastest / NUM_STEPS / len(writes) * 1e6


if __name__ == "__main__":
    uvloop.run(main())
