"""ImageFetcher: fetches images from allowed hosts over HTTP, and never from the network that the gateway runs in."""

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from proa.image.error import ImageError
from proa_gateway.errors import Overloaded
from proa_gateway.images.addresses import is_public
from proa_gateway.images.domains import AllowedDomain, check_url

MAX_REDIRECTS = 3
MAX_FETCHES = 24  # at the same time, each with up to `max_bytes` in memory; others wait
MAX_HOST_FETCHES = 8  # of them from one host, so that slow hosts leave others their share
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Without compression: it would let a small answer become a large one.
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "proa-gateway"}


class PublicResolver(AbstractResolver):
    """Refuses names with an address that is not public. aiohttp connects to the addresses that it returns, so what a
    name's server answers later does not count. aiohttp does not ask it for hosts that are addresses."""

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = await self._resolver.resolve(host, port, family)
        if not all(is_public(result["host"]) for result in results):
            raise ImageError("the URL's host is in a private network")
        return results

    async def close(self) -> None:
        await self._resolver.close()


class ImageFetcher:
    """Made in a running event loop."""

    def __init__(
        self,
        domains: Collection[AllowedDomain],
        *,
        timeout: float,
        max_bytes: int,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """`timeout`: seconds for one image, and before that for its turn. `resolver`: of names, by default the
        system's."""
        self._domains = domains
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._host_fetches: defaultdict[URL, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_HOST_FETCHES)
        )  # by origin: no more than there are allowed ones
        self.timeout = timeout
        self._max_bytes = max_bytes
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=PublicResolver(resolver or aiohttp.ThreadedResolver()), use_dns_cache=False, limit=0
            ),
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # no proxies and no credentials
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def fetch(self, url: str) -> bytes:
        """Raises `ImageError`, and `Overloaded` if too many other images are being fetched."""
        checked = check_url(url, self._domains)
        async with self._turn(checked):
            return await self._fetch(checked)

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def _turn(self, url: URL) -> AsyncIterator[None]:
        """Wait until fewer images are being fetched, from the host and in all. Redirects keep the turn of the first
        host. Raises `Overloaded`."""
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(self.timeout):
                    await turn.enter_async_context(self._host_fetches[url.origin()])
                    await turn.enter_async_context(self._fetches)
            except TimeoutError:
                message = "The server is at its limit of images that are fetched at the same time."
                raise Overloaded(message, limit="images") from None
            yield

    async def _fetch(self, url: URL) -> bytes:
        """Raises `ImageError`."""
        try:
            async with asyncio.timeout(self.timeout):
                return await self._follow(url)
        except TimeoutError:
            raise ImageError(f"fetching the image took longer than {self.timeout:g} s") from None
        except ImageError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ImageError(f"the image could not be fetched: {_reason(error)}") from error

    async def _follow(self, url: URL) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await self._read(response)
                location = response.headers.get("location", "")
            url = check_url(str(url.join(URL(location))), self._domains)
        raise ImageError(f"the image's server redirects more than {MAX_REDIRECTS} times")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise ImageError(f"the image's server answered with status {response.status}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ImageError("the image's server compressed its answer, though it was asked not to")
        too_large = f"the image has more than {self._max_bytes} bytes, the limit"
        if (response.content_length or 0) > self._max_bytes:
            raise ImageError(too_large)
        data = bytearray()
        async for part in response.content.iter_any():
            data += part
            if len(data) > self._max_bytes:
                raise ImageError(too_large)
        return bytes(data)


def _reason(error: Exception) -> str:
    """Without addresses, which are none of the client's business."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "its server's name is not known"
        case aiohttp.ClientSSLError():
            return "its server's certificate or TLS is not accepted"
        case aiohttp.ClientConnectorError():
            return "its server does not accept connections"
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError():
            return "its server broke the connection off"
        case _:
            return "its server does not answer as HTTP demands"
