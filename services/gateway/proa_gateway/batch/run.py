"""Runs a batch: sends the requests of a file to a gateway, or to one in this process, and writes the responses."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

import aiohttp
import orjson
import uvicorn
import uvloop

from proa_gateway.batch.config import BatchConfig
from proa_gateway.batch.files import (
    Answered,
    BatchRequest,
    BatchResponse,
    LineError,
    error_line,
    num_output_tokens,
    open_output,
    read_requests,
    response_line,
)
from proa_gateway.config import GatewayConfig
from proa_gateway.gateway import Gateway
from proa_gateway.server import make_server, prepare_process

INTERVAL = 5.0  # seconds between two lines
RETRIED = frozenset({429, 502, 503})
MAX_ATTEMPTS = 8
MAX_PAUSE = 60.0  # seconds between two attempts
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # the gateway limits the time of requests
START_TIMEOUT = 120.0  # seconds until all engines have loaded their models
_POLL = 0.05  # seconds
INTERRUPTED = 130  # the exit status of a program that SIGINT ended


@dataclass(slots=True)
class Progress:
    """Counts of this run. `num_failed`: of the lines that are done, those without status 200."""

    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0  # output tokens
    num_skipped: int = 0  # the output file had them already
    started: float = field(default_factory=time.perf_counter)  # by `time.perf_counter`

    def add(self, *, failed: bool, num_tokens: int = 0) -> None:
        self.num_done += 1
        self.num_failed += failed
        self.num_tokens += num_tokens

    def describe(self, seconds: float) -> str:
        """`seconds`: since the start."""
        rate = self.num_tokens / seconds if seconds > 0 else 0.0
        skipped = f", {self.num_skipped} answered before" if self.num_skipped else ""
        return f"{self.num_done} lines done, {self.num_failed} failed, {rate:.1f} output tokens/s{skipped}"

    def show(self) -> None:
        print(self.describe(time.perf_counter() - self.started), file=sys.stderr, flush=True)

    async def show_regularly(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            self.show()


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


async def run_batch(
    source: Iterable[bytes],
    output: BinaryIO,
    answered: Answered,
    client: BatchClient,
    progress: Progress,
    *,
    max_concurrency: int,
) -> None:
    """`source`: lines of the input. The output is in the order in which responses come. Raises `GatewayUnreachable`;
    the lines without a response are then not in the output."""
    requests = _unanswered(source, answered, progress)

    def append(line: bytes) -> None:
        output.write(line)
        output.flush()

    async def send_next() -> None:
        for request in requests:  # shared by all tasks
            if isinstance(request, LineError):
                append(error_line(request))
                progress.add(failed=True)
                await asyncio.sleep(0)  # a file may have many such lines
                continue
            response = await client.send(request)
            append(response_line(request, response))
            progress.add(failed=response.status != 200, num_tokens=num_output_tokens(response.body))

    showing = asyncio.create_task(progress.show_regularly())
    tasks = [asyncio.create_task(send_next()) for _ in range(max_concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in (*tasks, showing):
            task.cancel()
        await asyncio.gather(*tasks, showing, return_exceptions=True)
        progress.show()


def _unanswered(source: Iterable[bytes], answered: Answered, progress: Progress) -> Iterator[BatchRequest | LineError]:
    for request in read_requests(source):
        if isinstance(request, LineError):
            is_answered = request.line in answered.lines
        else:
            is_answered = request.custom_id in answered.custom_ids
        if is_answered:
            progress.num_skipped += 1
        else:
            yield request


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
            if sum(engine.accepts_requests for engine in gateway.pool.engines) == num_engines:
                return
        await asyncio.sleep(_POLL)
    addresses = ", ".join(config.engines)
    raise GatewayUnreachable(f"not all engines can be used after {START_TIMEOUT:g} s: {addresses}")


def run(config: BatchConfig) -> int:
    """The exit status: 0 if all lines in the output have status 200, else 1. Raises `OSError` or `ValueError` for files
    that cannot be used."""
    with config.input_file.open("rb") as source, open_output(config.output_file) as (output, answered):
        return uvloop.run(_run(config, source, output, answered))


async def _run(config: BatchConfig, source: Iterable[bytes], output: BinaryIO, answered: Answered) -> int:
    progress = Progress()
    try:
        async with _gateway(config) as url:
            _cancel_on_signals()  # after the gateway in this process, which has handlers too
            api_key = config.api_key or os.environ.get("PROA_API_KEY")
            async with batch_client(url, api_key, config.max_concurrency) as client:
                await run_batch(source, output, answered, client, progress, max_concurrency=config.max_concurrency)
    except GatewayUnreachable as error:
        print(f"The gateway cannot be reached: {error}. Run the command again to continue.", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("Interrupted. Run the command again to continue.", file=sys.stderr)
        return INTERRUPTED
    return 1 if answered.num_failed + progress.num_failed else 0


@asynccontextmanager
async def _gateway(config: BatchConfig) -> AsyncIterator[str]:
    """The URL of the gateway."""
    if config.url is not None:
        yield config.url
        return
    async with local_gateway(GatewayConfig(engines=config.engines, tokenizer=config.tokenizer)) as url:
        yield url


def _cancel_on_signals() -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
