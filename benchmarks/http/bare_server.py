"""A bare uvicorn application that writes ready-made SSE events: the limit for a gateway behind uvicorn.

In each step one task writes one event of the gateway's size to every stream; then the event loop runs, so that uvloop
sends them. The server's settings are the gateway's.

    python -m benchmarks.http.bare_server --port 8000
"""

import argparse
import asyncio

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"fake","choices":[{"index":0,"delta":{"content":" fox"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class BareApplication:
    """Answers every request with an endless stream of events."""

    def __init__(self) -> None:
        self._sends: list[Send] = []
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._sends.append(send)
        self._changed.set()
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            self._sends.remove(send)

    async def write_events(self) -> None:
        while True:
            if not self._sends:
                self._changed.clear()
                await self._changed.wait()
            for send in self._sends.copy():
                await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await asyncio.sleep(0)


async def serve(port: int) -> None:
    app = BareApplication()
    settings = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    writing = asyncio.create_task(app.write_events())
    try:
        await uvicorn.Server(settings).serve()
    finally:
        writing.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
