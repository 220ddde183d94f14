"""A gateway whose model has tools, for tests of what requests only offer or record. The engine answers nothing."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from support.chat import tool_tokenizer, tool_tokenizer_files
from support.fake_engine import EOS, FakeEngine, Reply, prompt_ids
from support.gateway import RunningGateway, running_gateway

_TOKENIZER = tool_tokenizer()


@dataclass(frozen=True, slots=True)
class Asked:
    """The response to a request, and the prompt that the engine got; empty for a request that no engine got."""

    response: httpx.Response
    prompt: str

    @property
    def ignored(self) -> str | None:
        header: str | None = self.response.headers.get("x-proa-ignored-fields")
        return header

    @property
    def warnings(self) -> str | None:
        header: str | None = self.response.headers.get("x-proa-warnings")
        return header

    @property
    def error(self) -> str:
        """The message of a status 400."""
        assert self.response.status_code == 400, self.response.text
        message: str = self.response.json()["error"]["message"]
        return message


@dataclass(frozen=True, slots=True)
class Door:
    engine: FakeEngine
    gateway: RunningGateway

    async def post(self, path: str, **body: Any) -> Asked:
        count = len(self.engine.requests)
        content = json.dumps({"model": "fake", **body})  # ASCII, so that tests can send lone surrogates
        headers = {"content-type": "application/json"}
        response = await self.gateway.http.post(path, content=content, headers=headers)
        sent = self.engine.requests[count:]
        text = _TOKENIZER.decode(prompt_ids(sent[-1]), skip_special_tokens=False) if sent else ""
        return Asked(response, text)

    async def ask(self, path: str, **body: Any) -> Asked:
        """As `post`, for a request that must be answered."""
        asked = await self.post(path, **body)
        assert asked.response.status_code == 200, asked.response.text
        return asked


@asynccontextmanager
async def open_door() -> AsyncIterator[Door]:
    async with (
        FakeEngine(files=tool_tokenizer_files(), max_model_len=16_384) as engine,
        running_gateway(engine) as gateway,
    ):
        engine.script = lambda request: Reply([EOS])
        yield Door(engine, gateway)
