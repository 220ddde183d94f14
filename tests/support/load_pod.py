"""Streaming clients, run as a pod to reach the Service like any other pod. Standard library only.

Each client sends chat requests one after another until it has sent `--requests` or `--stop-file` exists. Each request
is printed as a line of JSON: the question, the text, the outcome, its start and end (Unix seconds), the longest time
between two events of its stream, and the tokens of its prompt, all and cached ones.

With `--conversation` the requests of a client are one conversation over one connection, as of a client library: if the
connection breaks, the request is sent once more.
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

    async def send(self, path: str, host: str, key: str, body: Record, *, keep: bool) -> None:
        """`keep`: another request will follow."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: {'keep-alive' if keep else 'close'}\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(content)}\r\n\r\n"
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
        await self._line()

    async def rest(self) -> str:
        async with asyncio.timeout(self._timeout):
            return (await self._reader.read(300)).decode(errors="replace")

    async def _line(self) -> bytes:
        """Raises EOFError at the end."""
        async with asyncio.timeout(self._timeout):
            return await self._reader.readuntil(b"\n")


class Client:
    """Sends streaming requests. `keep`: over one connection, and once more if it breaks."""

    def __init__(self, host: str, port: int, key: str, read_timeout: float, *, keep: bool) -> None:
        self._address = host, port
        self._key = key
        self._timeout = read_timeout
        self._keep = keep
        self._kept: Connection | None = None

    async def ask(self, body: Record) -> Record:
        """Send one request; return its record. `error` is empty for success."""
        began, record = time.time(), empty_record()
        try:
            try:
                await self._ask(body, record)
            except (ConnectionError, EOFError):
                if not self._keep:
                    raise
                record = empty_record()
                await self._ask(body, record)
        except (OSError, EOFError, ValueError) as error:
            record["error"] = f"{type(error).__name__}: {error}"
        return record | {"began": began, "ended": time.time()}

    async def _ask(self, body: Record, record: Record) -> None:
        connection, self._kept = self._kept or await self._connect(), None
        try:
            await connection.send("/v1/chat/completions", self._address[0], self._key, body, keep=self._keep)
            if (status := await connection.status()) != 200:
                raise ValueError(f"status {status}: {await connection.rest()}")
            await read_events(connection, record)
        except BaseException:
            connection.writer.close()
            raise
        if self._keep:
            self._kept = connection
        else:
            connection.writer.close()

    async def _connect(self) -> Connection:
        """The address of a pod that has died is in the Service until its node knows: with `keep` try again."""
        async with asyncio.timeout(self._timeout):
            while True:
                try:
                    return Connection(*await asyncio.open_connection(*self._address), self._timeout)
                except ConnectionRefusedError:
                    if not self._keep:
                        raise
                    await asyncio.sleep(0.1)


def empty_record() -> Record:
    return {
        **{"text": "", "events": 0, "silence": 0.0, "finish_reason": None, "error": ""},
        **{"prompt_tokens": 0, "cached_tokens": 0},
    }


async def read_events(connection: Connection, record: Record) -> None:
    """Read until [DONE]. Raises ValueError for an error event or if the stream ends before [DONE]."""
    previous, is_done = time.monotonic(), False
    async for line in connection.lines():
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        record["silence"], previous = max(record["silence"], now - previous), now
        if line.strip() == b"data: [DONE]":
            is_done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(json.dumps(event["error"]))
        record["events"] += 1
        for choice in event["choices"]:
            record["text"] += choice["delta"].get("content") or ""
            record["finish_reason"] = choice["finish_reason"] or record["finish_reason"]
        if usage := event.get("usage"):
            record["prompt_tokens"] = usage["prompt_tokens"]
            record["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
    if not is_done:
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
    parser.add_argument(
        "--conversation", action="store_true", help="requests begin with those before and their answers"
    )
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
        keep = arguments.conversation
        client = Client(arguments.host, arguments.port, arguments.key, arguments.timeout, keep=keep)
        messages: list[Record] = []
        for index in range(arguments.requests):
            if index and (arguments.stop_file.exists() or time.monotonic() > deadline):
                return
            question = arguments.question or QUESTIONS[(number + index) % len(QUESTIONS)]
            question = "".join([*price_list(number, index, arguments.items), question])
            messages = [*(messages if keep else ()), {"role": "user", "content": question}]
            body = {
                "model": arguments.model,
                "messages": messages,
                "max_tokens": arguments.max_tokens,
                "temperature": arguments.temperature if number % 2 else 0.0,
                "seed": number,
                "ignore_eos": arguments.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            record = await client.ask(body)
            messages.append({"role": "assistant", "content": record["text"]})
            print(json.dumps(record | {"client": number, "index": index, "question": question}), flush=True)

    async with asyncio.TaskGroup() as clients:
        for number in range(arguments.clients):
            clients.create_task(client(number))


if __name__ == "__main__":
    main()
