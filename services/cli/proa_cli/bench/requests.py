"""The requests of a benchmark, encoded."""

import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson

from proa_cli.bench.client import Call
from proa_cli.bench.options import SAMPLING, ServerOptions


def request_headers(server: ServerOptions) -> dict[str, str]:
    """The key is that of `PROA_API_KEY` or `OPENAI_API_KEY`, unless --header has one."""
    key = os.environ.get("PROA_API_KEY") or os.environ.get("OPENAI_API_KEY")
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    return {"Content-Type": "application/json", **authorization, **dict(server.header)}


def model_names(server: ServerOptions, model: str, count: int, draw: np.random.Generator) -> list[str]:
    """The model or adapter that each request names."""
    if not server.lora_modules:
        return [model] * count
    if server.lora_assignment == "round-robin":
        return list(itertools.islice(itertools.cycle(server.lora_modules), count))
    return [server.lora_modules[index] for index in draw.integers(0, len(server.lora_modules), size=count)]


class Requests:
    """Makes requests with the fields that the flags give to all of them."""

    def __init__(self, server: ServerOptions, headers: Mapping[str, str], *, ignores_eos: bool) -> None:
        self._server, self._headers = server, headers
        self.prefix = server.request_id_prefix or f"bench-{secrets.token_hex(4)}-"
        self._numbers = itertools.count()
        sampling = {name: getattr(server, name) for name in SAMPLING}
        common = {name: value for name, value in sampling.items() if value is not None}
        common |= {"stream": True, "stream_options": {"include_usage": True}}
        common |= {"ignore_eos": True} if ignores_eos else {}
        if server.logprobs is not None:
            common |= (
                {"logprobs": True, "top_logprobs": server.logprobs} if server.is_chat else {"logprobs": server.logprobs}
            )
        self._common = common

    def make(
        self,
        model: str,
        parts: Sequence[str],
        output_tokens: int,
        prompt_tokens: int | None,
        session: Mapping[str, str] = MappingProxyType({}),
    ) -> Call:
        """`parts` of the prompt: by turns what the user and what the model says; a completion has them in one text.
        `session`: headers that name it."""
        if self._server.is_chat:
            roles = itertools.cycle(("user", "assistant"))
            messages = [{"role": role, "content": part} for role, part in zip(roles, parts, strict=False)]
            body: dict[str, Any] = {"messages": messages, "max_completion_tokens": output_tokens}
        else:
            body = {"prompt": "".join(parts), "max_tokens": output_tokens}
        body = {"model": model, **body, **self._common, **(self._server.extra_body or {})}
        headers = {**self._headers, **session, "X-Request-Id": f"{self.prefix}{next(self._numbers)}"}
        return Call(self._server.api_url, orjson.dumps(body), headers, prompt_tokens)
