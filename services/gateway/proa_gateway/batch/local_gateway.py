"""A gateway in this process, for a batch that has engines and no gateway."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from proa_gateway.batch.client import GatewayUnreachable
from proa_gateway.config import GatewayConfig
from proa_gateway.gateway import Gateway
from proa_gateway.server import make_server, prepare_process

START_TIMEOUT = 120.0  # seconds until all engines have loaded their models
_POLL = 0.05  # seconds


@asynccontextmanager
async def local_gateway(config: GatewayConfig) -> AsyncIterator[str]:
    """The URL of a gateway with usable engines. Raises `GatewayUnreachable`."""
    prepare_process()
    server = make_server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await _wait_until_ready(server, serving, config)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def _wait_until_ready(server: uvicorn.Server, serving: asyncio.Task[None], config: GatewayConfig) -> None:
    num_engines = len(set(config.engines))
    for _ in range(round(START_TIMEOUT / _POLL)):
        if serving.done():
            serving.result()
            raise GatewayUnreachable("the gateway did not start")
        if server.started:
            gateway: Gateway = server.lifespan.state["gateway"]
            if sum(engine.usable for engine in gateway.pool.engines) == num_engines:
                return
        await asyncio.sleep(_POLL)
    addresses = ", ".join(config.engines)
    raise GatewayUnreachable(f"not all engines can be used after {START_TIMEOUT:g} s: {addresses}")
