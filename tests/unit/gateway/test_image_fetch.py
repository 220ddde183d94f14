"""Fetching images over HTTP: from allowed hosts, within limits, and never from private networks."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from proa.image.limits import ImageError
from proa_gateway.errors import Overloaded
from proa_gateway.images.config import AllowedDomain
from proa_gateway.images.fetch import MAX_HOST_FETCHES, MediaFetcher, PublicResolver

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
DATA = bytes(1000)


class FakeResolver(AbstractResolver):
    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in self._addresses
        ]

    async def close(self) -> None:
        pass


@asynccontextmanager
async def serving(handler: Handler, **options: Any) -> AsyncIterator[tuple[MediaFetcher, str]]:
    """A fetcher that may fetch from a server on loopback, and the server's URL."""
    server = web.Server(handler)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    settings: dict[str, Any] = {"timeout": 30.0, "max_bytes": len(DATA)} | options
    fetcher = MediaFetcher([AllowedDomain("127.0.0.1", port)], **settings)
    try:
        yield fetcher, f"http://127.0.0.1:{port}"
    finally:
        await fetcher.close()
        listening.close()
        await server.shutdown(0)


async def test_an_image_is_fetched_from_an_address_that_was_named() -> None:
    requests = []

    async def answer(request: web.BaseRequest) -> web.Response:
        requests.append((request.path_qs, request.headers["accept-encoding"], request.headers.get("cookie")))
        response = web.Response(body=DATA)
        response.set_cookie("name", "value")
        return response

    async with serving(answer) as (fetcher, url):
        for _ in range(2):
            assert await fetcher.fetch(f"{url}/a%20b.png?size=2") == DATA
    assert requests == [("/a%20b.png?size=2", "identity", None)] * 2


async def test_another_port_of_an_allowed_host_is_refused() -> None:
    async with serving(lambda request: asyncio.sleep(0, web.Response(body=DATA))) as (fetcher, _):
        with pytest.raises(ImageError, match="not fetched from the URL's host and port"):
            await fetcher.fetch("http://127.0.0.1:1/")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_an_image_over_the_limit_is_refused(is_chunked: bool) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        if not is_chunked:
            response.content_length = len(DATA) + 1
        await response.prepare(request)
        await response.write(DATA + b"1")
        return response

    async with serving(answer) as (fetcher, url):
        with pytest.raises(ImageError, match="more than 1000 bytes"):
            await fetcher.fetch(url)


async def test_a_slow_server_is_given_up() -> None:
    given_up = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.Response:
        await given_up.wait()
        return web.Response(body=DATA)

    async with serving(answer, timeout=0.05) as (fetcher, url):
        with pytest.raises(ImageError, match=r"took longer than 0\.05 s"):
            await fetcher.fetch(url)
        given_up.set()


async def test_a_slow_host_leaves_others_their_share() -> None:
    given_up = asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.Response:
        await given_up.wait()
        return web.Response(body=DATA)

    async def fast(request: web.BaseRequest) -> web.Response:
        return web.Response(body=DATA)

    async with serving(slow) as (_, slow_url), serving(fast) as (_, fast_url):
        domains = [AllowedDomain.parse(url.removeprefix("http://")) for url in (slow_url, fast_url)]
        fetcher = MediaFetcher(domains, timeout=30, max_bytes=len(DATA))
        fetches = [asyncio.create_task(fetcher.fetch(slow_url)) for _ in range(60)]
        await asyncio.sleep(0)  # they wait before the next one does
        assert await fetcher.fetch(fast_url) == DATA
        assert not any(fetch.done() for fetch in fetches)
        given_up.set()
        assert set(await asyncio.gather(*fetches)) == {DATA}
        await fetcher.close()


async def test_an_image_that_does_not_get_its_turn_is_no_fault_of_the_request() -> None:
    given_up = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.Response:
        await given_up.wait()
        return web.Response(body=DATA)

    async with serving(answer) as (fetcher, url):
        fetches = [asyncio.create_task(fetcher.fetch(url)) for _ in range(MAX_HOST_FETCHES)]
        await asyncio.sleep(0)
        fetcher.timeout = 0.05
        with pytest.raises(Overloaded, match="limit of images that are fetched"):
            await fetcher.fetch(url)
        given_up.set()
        assert set(await asyncio.gather(*fetches)) == {DATA}


@pytest.mark.parametrize(("num_redirects", "is_fetched"), [(3, True), (4, False)])
async def test_three_redirects_are_followed(num_redirects: int, is_fetched: bool) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        number = int(request.path.strip("/") or 0)
        if number == num_redirects:
            return web.Response(body=DATA)
        return web.Response(status=302, headers={"location": f"/{number + 1}"})

    async with serving(answer) as (fetcher, url):
        if is_fetched:
            assert await fetcher.fetch(url) == DATA
        else:
            with pytest.raises(ImageError, match="more than 3 times"):
                await fetcher.fetch(url)


@pytest.mark.parametrize(
    "location", ["http://169.254.169.254/latest/meta-data", "http://127.0.0.1:1/", "file:///etc/passwd", "http://["]
)
async def test_a_redirect_is_checked_as_a_url_of_the_request(location: str) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(status=307, headers={"location": location})

    async with serving(answer) as (fetcher, url):
        with pytest.raises(ImageError):
            await fetcher.fetch(url)


@pytest.mark.parametrize(
    ("status", "headers", "reason"),
    [(404, {}, "status 404"), (500, {}, "status 500"), (200, {"content-encoding": "gzip"}, "compressed")],
)
async def test_other_answers_are_refused(status: int, headers: dict[str, str], reason: str) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(status=status, headers=headers, body=DATA)

    async with serving(answer) as (fetcher, url):
        with pytest.raises(ImageError, match=reason):
            await fetcher.fetch(url)


async def test_a_connection_that_breaks_off_is_an_error_of_the_image() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(DATA)
        await response.prepare(request)
        await response.write(DATA[:10])
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(answer) as (fetcher, url):
        with pytest.raises(ImageError, match="broke the connection off"):
            await fetcher.fetch(url)


async def test_nothing_is_fetched_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=DATA)

    async with serving(answer) as (fetcher, url):
        assert await fetcher.fetch(url) == DATA


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["10.0.0.5"], ["8.8.8.8", "10.0.0.5"], ["::ffff:127.0.0.1"]])
async def test_a_name_with_a_private_address_is_refused(addresses: list[str]) -> None:
    resolver = FakeResolver(*addresses)
    fetcher = MediaFetcher([AllowedDomain("images.example")], timeout=30.0, max_bytes=10, resolver=resolver)
    try:
        with pytest.raises(ImageError, match="in a private network"):
            await fetcher.fetch("http://images.example/a.png")
    finally:
        await fetcher.close()


async def test_connections_go_to_the_addresses_that_were_checked() -> None:
    resolver = PublicResolver(FakeResolver("8.8.8.8"))
    assert [result["host"] for result in await resolver.resolve("images.example", 443)] == ["8.8.8.8"]


@pytest.mark.parametrize("url", ["http://2130706433/", "http://127.1/"])
async def test_numbers_that_are_no_canonical_address_are_refused_even_if_named(url: str) -> None:
    fetcher = MediaFetcher([AllowedDomain.parse(url.split("/")[2])], timeout=30.0, max_bytes=10)
    try:
        with pytest.raises(ImageError):
            await fetcher.fetch(url)
    finally:
        await fetcher.close()


URLS_OF_A_PRIVATE_NETWORK = """
    http://127.0.0.1:{} http://127.0.0.1.:{} http://localhost:{} http://LOCALHOST:{} http://localhost.:{} http://127.1:{}
    http://127.0.1:{} http://0:{} http://0.0.0.0:{} http://2130706433:{} http://0x7f000001:{} http://017700000001:{}
    http://0x7f.0.0.1:{} http://0177.0.0.1:{} http://127.000.000.001:{} http://[::1]:{} http://[::]:{}
    http://[0:0:0:0:0:0:0:1]:{} http://[::ffff:127.0.0.1]:{} http://[::ffff:7f00:1]:{} http://[::127.0.0.1]:{}
    http://[64:ff9b::7f00:1]:{} http://[::1%25lo]:{} http://127%2e0%2e0%2e1:{} http://%6cocalhost:{} http://①②⑦.0.0.1:{}
    http://127。0。0。1:{} http://ⓛocalhost:{} http://user@127.0.0.1:{} http://images.example@127.0.0.1:{}
    http://images.example:80@127.0.0.1:{} http://images.example%40127.0.0.1:{} http://127.0.0.1:{}#@images.example
    http://127.0.0.1:{}?@images.example http://127.0.0.1:{}\\@images.example http://images.example\\@127.0.0.1:{}
    http:\\\\127.0.0.1:{} http:/127.0.0.1:{} http:127.0.0.1:{} //127.0.0.1:{} HTTP://127.0.0.1:{} ftp://127.0.0.1:{}
    gopher://127.0.0.1:{} http://images.example.:{} http://images.example:{} http://x.images.example:{}
"""


async def test_no_form_of_a_url_reaches_the_network_of_the_gateway() -> None:
    connections = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        domains = [AllowedDomain("images.example"), AllowedDomain("images.example", port)]
        fetcher = MediaFetcher(domains, timeout=30.0, max_bytes=10, resolver=FakeResolver("127.0.0.1"))
        try:
            for form in URLS_OF_A_PRIVATE_NETWORK.split():
                with pytest.raises(ImageError):
                    await fetcher.fetch(form.format(port) + "/a.png")
        finally:
            await fetcher.close()
    assert connections == 0
