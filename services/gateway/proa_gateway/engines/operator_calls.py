"""Operators' calls to engines: each goes to all connected engines, or to those of one model."""

import asyncio
from typing import TypeVar

from proa_gateway.engines.client import EngineCall
from proa_gateway.engines.pool import EnginePool

T = TypeVar("T")


async def call_engines(pool: EnginePool, model: str | None, call: EngineCall[T]) -> dict[str, T]:
    """The answers by address. All engines are called, also if one fails; then the first error is raised.

    Raises `ModelNotFound`, `EngineUnavailable` and `InvalidRequest`.
    """
    engines = pool.connected(model)
    answers = await asyncio.gather(*(engine.call(call) for engine in engines), return_exceptions=True)
    results: dict[str, T] = {}
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        results[engine.address] = answer
    return results
