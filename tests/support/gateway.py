"""A gateway in the test's event loop, on a real socket, so that tests can be slow or misbehaving clients."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from proa_gateway.config import Deadlines, GatewayConfig
from proa_gateway.gateway import Gateway
from proa_gateway.server import make_server
from support.fake_engine import FakeEngine

# The engines are in the same event loop, which a loaded machine may hold up.
PATIENT = Deadlines(connect=10.0, heartbeat=10.0, shutdown=5.0)
# Clients of these gateways use no TLS. Each would read all certificates of the machine, which takes 25 ms.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True)
class RunningGateway:
    """`gateway` is the object that routes use; `http` and `openai` are clients."""

    port: int
    gateway: Gateway
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    @asynccontextmanager
    async def anthropic_client(self, api_key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
        url = f"http://127.0.0.1:{self.port}"
        async with (
            anthropic.DefaultAsyncHttpxClient(verify=NO_CERTIFICATES) as transport,
            anthropic.AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0, http_client=transport) as client,
        ):
            yield client

    async def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=chat_body(text, **fields))

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "fake", "prompt": prompt, **fields})

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream, parsed; `[DONE]` is a string."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            return [event async for event in events_of(response)]


def chat_body(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


async def events_of(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line and not line.startswith(":"):  # a comment, while no token comes
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def running_gateway(
    *engines: FakeEngine | str, ready: bool = True, deadlines: Deadlines = PATIENT, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway for these engines, or addresses. `ready`: wait until all of them are usable."""
    addresses = tuple(engine if isinstance(engine, str) else engine.address for engine in engines)
    config = GatewayConfig(engines=addresses, host="127.0.0.1", port=0, deadlines=deadlines)
    server = make_server(replace(config, **settings))
    server.capture_signals = nullcontext  # type: ignore
    stop = asyncio.Event()

    async def until_stop() -> None:  # uvicorn's own loop asks every 0.1 s
        await server.on_tick(0)
        await stop.wait()

    server.main_loop = until_stop  # type: ignore
    with listening_socket() as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            gateway: Gateway = server.lifespan.state["gateway"]
            if ready:
                await until(lambda: sum(one.accepts_requests for one in gateway.pool.engines) == len(addresses))
            port = listener.getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            async with (
                httpx.AsyncClient(base_url=url, timeout=30, verify=NO_CERTIFICATES) as http,
                DefaultAsyncHttpxClient(verify=NO_CERTIFICATES) as transport,
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport) as openai,
            ):
                yield RunningGateway(port, gateway, http, openai)
        finally:
            stop.set()
            await serving


async def until(predicate: Callable[[], Any], seconds: float = 10.0) -> None:
    """Poll until `predicate()` is true."""
    async with asyncio.timeout(seconds):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextmanager
def listening_socket() -> Any:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener
