"""The bytes of images and audio files: from data URLs, or fetched from addresses that the gateway may reach."""

import asyncio
import socket
from binascii import Error, a2b_base64
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import unquote

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from proa.image.limits import ImageError
from proa_gateway.errors import Overloaded
from proa_gateway.images.config import AllowedDomain, check_url

# Named here where versions of Python differ. https://www.iana.org/assignments/iana-ipv4-special-registry
_SPECIAL_IPV4 = [
    IPv4Network("100.64.0.0/10"),  # shared by carriers
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
]
_GLOBAL_UNICAST = IPv6Network("2000::/3")  # outside: IPv4-mapped, NAT64, link-local, unique local, multicast, …
_SPECIAL_IPV6 = [
    IPv6Network("2001::/23"),  # Teredo, …
    IPv6Network("2001:db8::/32"),
    IPv6Network("2002::/16"),  # 6to4
    IPv6Network("3fff::/20"),
]
_URL_SAFE = str.maketrans("-_", "+/")
MAX_REDIRECTS = 3
MAX_FETCHES = 24  # at the same time, each with up to `max_bytes` in memory; others wait
MAX_HOST_FETCHES = 8  # of them from one host, so that slow hosts leave others their share
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Without compression: it would let a small answer become a large one.
_HEADERS = {"accept": "image/*, audio/*, video/*", "accept-encoding": "identity", "user-agent": "proa-gateway"}


def is_public(address: str) -> bool:
    """Raises `ValueError` for what is no address."""
    parsed = ip_address(address)
    return _is_public_ipv4(parsed) if isinstance(parsed, IPv4Address) else _is_public_ipv6(parsed)


def _is_public_ipv4(address: IPv4Address) -> bool:
    if address.is_multicast or address.is_reserved or any(address in network for network in _SPECIAL_IPV4):
        return False
    return address.is_global


def _is_public_ipv6(address: IPv6Address) -> bool:
    if address not in _GLOBAL_UNICAST or any(address in network for network in _SPECIAL_IPV6):
        return False
    return address.is_global


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def read_data_url(url: str, max_bytes: int, name: str = "image") -> bytes:
    """`name`: of what it has, for errors. The media type is not read: what the file is decides. Raises `ImageError`."""
    header, comma, text = url[5:].partition(",")
    if not comma or header.rpartition(";")[2].strip().lower() != "base64":
        raise ImageError("the data URL is not of the form data:image/png;base64,…")
    if (num_bytes := len(text) // 4 * 3 - 2) > max_bytes:
        raise ImageError(f"the {name} has about {num_bytes} bytes, the limit is {max_bytes}")
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError:  # Error, or a character that is not ASCII
        return _read_lenient(text)


def _read_lenient(text: str) -> bytes:
    """Decode base64 as some clients send it: with line breaks, percent escapes, the URL-safe alphabet, or no
    padding."""
    plain = "".join(unquote(text).split()).translate(_URL_SAFE).rstrip("=")
    try:
        return a2b_base64(plain + "=" * (-len(plain) % 4), strict_mode=True)
    except (Error, ValueError):
        raise ImageError("the data URL's base64 is damaged") from None


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


class MediaFetcher:
    """Made in a running event loop."""

    def __init__(
        self,
        domains: Collection[AllowedDomain],
        *,
        timeout: float,
        max_bytes: int,
        name: str = "image",
        limit: str = "images",
        resolver: AbstractResolver | None = None,
    ) -> None:
        """`timeout`: seconds for one file, and before that for its turn. `name`: of what files are, for errors.
        `limit`: the gateway's limit that too many exceed. `resolver`: of names, by default the system's."""
        self._domains = domains
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        # By origin, of which there are no more than are allowed.
        self._host_fetches = defaultdict[URL, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_HOST_FETCHES))
        self.timeout = timeout
        self._max_bytes = max_bytes
        self._name = name
        self._limit = limit
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
        checked = check_url(url, self._domains, self._name)
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
                message = f"The server is at its limit of {self._name}s that are fetched at the same time."
                raise Overloaded(message, limit=self._limit) from None
            yield

    async def _fetch(self, url: URL) -> bytes:
        """Raises `ImageError`."""
        try:
            async with asyncio.timeout(self.timeout):
                return await self._follow(url)
        except TimeoutError:
            raise ImageError(f"fetching the {self._name} took longer than {self.timeout:g} s") from None
        except ImageError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ImageError(f"the {self._name} could not be fetched: {_reason(error)}") from error

    async def _follow(self, url: URL) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await self._read(response)
                location = response.headers.get("location", "")
            url = check_url(str(url.join(URL(location))), self._domains, self._name)
        raise ImageError(f"the {self._name}'s server redirects more than {MAX_REDIRECTS} times")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise ImageError(f"the {self._name}'s server answered with status {response.status}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ImageError(f"the {self._name}'s server compressed its answer, though it was asked not to")
        too_large = f"the {self._name} has more than {self._max_bytes} bytes, the limit"
        if (response.content_length or 0) > self._max_bytes:
            raise ImageError(too_large)
        data = bytearray()
        async for part in response.content.iter_any():
            data += part
            if len(data) > self._max_bytes:
                raise ImageError(too_large)
        return bytes(data)


def _reason(error: Exception) -> str:
    """Return the reason for the client. It has no addresses, which may be those of a private network."""
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
