"""Sends one streamed request and takes its times.

Of 64 streams as fast as a gateway with a fake engine goes, 49,000 events a second on a machine with two cores, aiohttp
and the parsing take 0.30 of a core, the gateway 0.37. Ready-made events of a bare server
(`benchmarks/http/bare_server.py`) cost aiohttp 4 microseconds each, bare sockets with httptools 3.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from proa.addresses import is_loopback_url

_READ_BYTES = 1 << 18
_MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Call:
    """A request, encoded before the clock starts."""

    url: str
    body: bytes
    headers: Mapping[str, str]
    prompt_tokens: int | None  # of the prompt as it was made; None: not counted


@dataclass(slots=True)
class Sample:
    """What was measured of one request. Times in seconds.

    A chunk is an event with tokens. `gaps` are the times between chunks: a chunk may have several tokens, if the server
    has generated several before it could send, or in one step by speculation. A token may have no text; an event that
    only names the role or the finish reason is no chunk.
    """

    start: float  # `time.monotonic`, which all processes of a machine share
    queued: float = 0.0  # before `start`, waiting because `max_concurrency` requests were running
    ttft: float = 0.0
    latency: float = 0.0  # until the last chunk or the finish reason
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, if the server says so
    output_tokens: int = 0
    has_usage: bool = False
    text: str = ""
    error: str = ""

    @property
    def chunks(self) -> int:
        return len(self.gaps) + 1 if self.ttft else 0


def open_session(url: str, *, verify: bool = True) -> aiohttp.ClientSession:
    """A session without a limit of connections or of time: both are the load's. Close it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=verify),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
        read_bufsize=_READ_BYTES,
        trust_env=not is_loopback_url(url),
    )


async def send(session: aiohttp.ClientSession, call: Call) -> Sample:
    """Send a request and read its stream. A failure is a sample with `error`."""
    sample = Sample(time.monotonic(), prompt_tokens=call.prompt_tokens or 0)
    try:
        async with session.post(call.url, data=call.body, headers=call.headers) as response:
            if response.status != 200:
                sample.error = f"HTTP {response.status}: {message_of(await response.read())}"
                return sample
            await _read(response.content, sample)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    return sample


async def _read(content: aiohttp.StreamReader, sample: Sample) -> None:
    last, rest, is_done = sample.start, b"", False
    async for received in content.iter_any():
        now = time.monotonic()
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                is_done = True
                continue
            event = orjson.loads(data)
            if usage := event.get("usage"):
                sample.has_usage = True
                sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if "error" in event:
                sample.error = message_of(data)
            for choice in event.get("choices") or ():
                text = text_of(choice)
                sample.text += text
                if text or not (choice.get("finish_reason") or (choice.get("delta") or {}).get("role")):
                    if sample.ttft:
                        sample.gaps.append(now - last)
                    else:
                        sample.ttft = now - sample.start
                    last = now
                sample.latency = now - sample.start
    if not sample.ttft and sample.output_tokens:  # one token without text, which came with the finish reason
        sample.ttft = sample.latency
    if not sample.has_usage:
        sample.output_tokens = sample.chunks
    if not sample.error and not (is_done and sample.latency):
        sample.error = "the stream ended early"


def text_of(choice: Mapping[str, Any]) -> str:
    """What a choice of an event adds: text, reasoning, or a tool call; "" if nothing."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    text = (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")
    for tool_call in delta.get("tool_calls") or ():
        function = tool_call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def message_of(body: bytes) -> str:
    """The message of an error in the form of the OpenAI API; the beginning of any other answer."""
    try:
        error = orjson.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return " ".join(str(message).split())[:_MAX_ERROR_CHARACTERS]
