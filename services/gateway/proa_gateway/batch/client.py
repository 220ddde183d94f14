"""BatchClient: sends one request at a time, again where the gateway asks for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import orjson

from proa_gateway.batch.lines import BatchRequest, BatchResponse

RETRIED = frozenset({429, 502, 503})
MAX_ATTEMPTS = 8
MAX_PAUSE = 60.0  # seconds between two attempts
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # the gateway limits the time of requests


class GatewayUnreachable(Exception):
    """Nothing answers at the gateway's address, or connections to it break off."""


class BatchClient:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """`url`: of the gateway, without /v1."""
        self._session = session
        self._url = url.rstrip("/")

    async def send(self, request: BatchRequest) -> BatchResponse:
        """The response of the last attempt. Raises `GatewayUnreachable`."""
        for attempt in range(MAX_ATTEMPTS):
            is_last = attempt == MAX_ATTEMPTS - 1
            pause = min(MAX_PAUSE, 0.5 * 2**attempt)
            try:
                async with self._session.post(self._url + request.url, data=orjson.dumps(request.body)) as response:
                    if response.status not in RETRIED or is_last:
                        return await _read(response)
                    pause = _retry_after(response, pause)
            except (aiohttp.ClientError, TimeoutError) as error:
                if is_last:
                    raise GatewayUnreachable(str(error) or type(error).__name__) from None
            await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


@asynccontextmanager
async def batch_client(url: str, api_key: str | None, max_connections: int) -> AsyncIterator[BatchClient]:
    headers = {"content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=max_connections)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=_TIMEOUT) as session:
        yield BatchClient(session, url)


async def _read(response: aiohttp.ClientResponse) -> BatchResponse:
    """The body is text if it is not JSON, for example a proxy's."""
    data = await response.read()
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        body = data.decode(errors="replace")
    return BatchResponse(response.status, response.headers.get("x-request-id", ""), body)


def _retry_after(response: aiohttp.ClientResponse, default: float) -> float:
    value = response.headers.get("retry-after", "")
    return min(MAX_PAUSE, float(value)) if value.isascii() and value.isdigit() else default
