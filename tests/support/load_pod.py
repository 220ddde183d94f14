"""Streaming clients, run as a pod to reach the Service like any other pod. Standard library only.

Each client sends chat requests one after another until it has sent `--requests` or `--stop-file` exists. Each request
is printed as a line of JSON: the question, the text, the outcome, its start and end (Unix seconds), and the longest
time between two events of its stream.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

QUESTIONS = (
    "What is the capital of France?",
    "What is 3 plus 4?",
    "Tell me about a small boat on the sea.",
    "Who are you?",
    "Count from 1 to 40.",
)

Record = dict[str, Any]


class Connection:
    """One HTTP/1.1 request and its response. Reads raise TimeoutError after `timeout` seconds, as a socket's would."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float) -> None:
        self.writer = writer
        self._reader = reader
        self._timeout = timeout

    async def send(self, path: str, host: str, key: str, body: Record) -> None:
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.writer.write(head.encode() + content)
        await self.writer.drain()

    async def status(self) -> int:
        status = int((await self._line()).split()[1])
        while (await self._line()).strip():
            pass
        return status

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of a body that is sent in chunks."""
        rest = b""
        while size := int(await self._line(), 16):
            async with asyncio.timeout(self._timeout):
                rest += (await self._reader.readexactly(size + 2))[:-2]
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield line

    async def rest(self) -> str:
        async with asyncio.timeout(self._timeout):
            return (await self._reader.read(300)).decode(errors="replace")

    async def _line(self) -> bytes:
        """Raises EOFError at the end."""
        async with asyncio.timeout(self._timeout):
            return await self._reader.readuntil(b"\n")


async def ask(host: str, port: int, body: Record, read_timeout: float, key: str) -> Record:
    """Send one streaming request; return its record. `error` is empty for success."""
    record: Record = {"began": time.time(), "text": "", "events": 0, "silence": 0.0, "finish_reason": None, "error": ""}
    try:
        async with asyncio.timeout(read_timeout):
            connection = Connection(*await asyncio.open_connection(host, port), read_timeout)
        try:
            await connection.send("/v1/chat/completions", host, key, body | {"stream": True})
            if (status := await connection.status()) != 200:
                raise OSError(f"status {status}: {await connection.rest()}")
            await read_events(connection, record)
        finally:
            connection.writer.close()
    except (OSError, EOFError, ValueError) as error:
        record["error"] = f"{type(error).__name__}: {error}"
    return record | {"ended": time.time()}


async def read_events(connection: Connection, record: Record) -> None:
    """Read until [DONE]. Raises ValueError for an error event or if the stream ends before [DONE]."""
    previous = time.monotonic()
    async for line in connection.lines():
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        record["silence"], previous = max(record["silence"], now - previous), now
        if line.strip() == b"data: [DONE]":
            return
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(json.dumps(event["error"]))
        record["events"] += 1
        for choice in event["choices"]:
            record["text"] += choice["delta"].get("content") or ""
            record["finish_reason"] = choice["finish_reason"] or record["finish_reason"]
    raise ValueError("the stream ended before [DONE]")


def price_list(client: int, index: int, items: int) -> list[str]:
    """Lines that differ from their beginning on, so that no two requests share blocks of the prefix cache."""
    return [f"Item {item} of list {client}.{index} costs {item * 7 % 50} coins. " for item in range(items)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=80)
    parser.add_argument("--model", default="proa-builtin")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of each client")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--question", help="default: several questions in turn")
    parser.add_argument("--items", type=int, default=0, help="lines before each question, other ones in each request")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every second client; the others use 0")
    parser.add_argument("--ignore-eos", action="store_true", help="tokens after the end token may have no text")
    parser.add_argument("--timeout", type=float, default=60.0, help="socket timeout in seconds")
    parser.add_argument("--seconds", type=float, default=600.0, help="no request starts later than this")
    parser.add_argument("--stop-file", type=Path, default=Path("/tmp/stop"))
    parser.add_argument("--key", default="none")
    arguments = parser.parse_args()
    asyncio.run(run(arguments))


async def run(arguments: argparse.Namespace) -> None:
    """All clients in one thread: a thousand threads would take the machine's time from what is tested."""
    deadline = time.monotonic() + arguments.seconds

    async def client(number: int) -> None:
        for index in range(arguments.requests):
            if index and (arguments.stop_file.exists() or time.monotonic() > deadline):
                return
            question = arguments.question or QUESTIONS[(number + index) % len(QUESTIONS)]
            question = "".join([*price_list(number, index, arguments.items), question])
            body = {
                "model": arguments.model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": arguments.max_tokens,
                "temperature": arguments.temperature if number % 2 else 0.0,
                "seed": number,
                "ignore_eos": arguments.ignore_eos,
            }
            record = await ask(arguments.host, arguments.port, body, arguments.timeout, arguments.key)
            print(json.dumps(record | {"client": number, "index": index, "question": question}), flush=True)

    async with asyncio.TaskGroup() as clients:
        for number in range(arguments.clients):
            clients.create_task(client(number))


if __name__ == "__main__":
    main()
