"""Calls to all engines of a model: operators' calls, and loading adapters."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from proa.contract import Lora
from proa_gateway.engines import convert
from proa_gateway.engines.client import EngineCall, EngineClient
from proa_gateway.engines.models import LoraRegistry
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import EngineUnavailable, InvalidRequest, LoraNotFound, LoraNotLoaded

T = TypeVar("T")
UNLOAD_SECONDS = 600.0  # an engine answers between two steps, and a step of a CPU may take minutes


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


async def load_on_engines(
    pool: EnginePool, loras: LoraRegistry, name: str, path: str, model: str, *, replace: bool
) -> None:
    """Load an adapter on all engines with a session. Others load it when the first request for it comes to them.

    The first engine shows whether it can be loaded: if not, nothing has changed, and its error is raised. Afterwards
    requests get the new content. Raises `InvalidRequest` for a name that is loaded with another path, or everywhere,
    or for another model, `LoraNotLoaded` also if some engines have failed.
    """
    engines = [engine for engine in pool.connected(model) if engine.loras.max_loras]
    if not engines:
        raise EngineUnavailable(f"The engines of the model {model!r} run without --enable-lora.")
    known = loras.get(name)
    if known is not None and known.base_model not in (None, model):
        message = f"The lora adapter '{name}' belongs to the model {known.base_model!r}."
        raise InvalidRequest(message, param="lora_name")
    if known is not None and not replace:
        lora = known.lora
        if lora.path != path or all(engine.loras.get(lora) is not None for engine in engines):
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            raise InvalidRequest(message, param="lora_name")
    first, *others = engines
    lora = await first.load_lora(Lora(name=name, path=path, digest=""), replace=replace)
    loras.give(lora, model)
    results = await asyncio.gather(*(each.load_lora(lora, replace=replace) for each in others), return_exceptions=True)
    failures = [str(result) for result in results if isinstance(result, LoraNotLoaded)]
    failures += [
        f"Engine {engine.address} loaded another content."
        for engine, result in zip(others, results, strict=True)
        if isinstance(result, Lora) and result.digest != lora.digest
    ]
    _raise_unexpected(results)
    if failures:
        raise LoraNotLoaded(
            f"The adapter {name!r} was loaded by {len(engines) - len(failures)} of {len(engines)} engines. "
            + " ".join(failures)
        )


async def unload_from_engines(pool: EnginePool, loras: LoraRegistry, name: str) -> None:
    """Forget an adapter, and unload it from the engines that have it. Its requests go on.

    Raises `LoraNotFound` if neither this gateway nor an engine knows it, `LoraNotLoaded` if engines still have it.
    """
    known = loras.get(name)
    engines = [engine for engine in pool.engines if engine.loras.has_name(name)]
    if known is None and not engines:
        raise LoraNotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
    loras.forget(name)
    results = await asyncio.gather(*(_unload(engine, name) for engine in engines), return_exceptions=True)
    failures = [str(result) for result in results if isinstance(result, EngineUnavailable | LoraNotLoaded)]
    _raise_unexpected(results)
    if failures:
        raise LoraNotLoaded(
            f"The adapter {name!r} was unloaded from {len(engines) - len(failures)} of {len(engines)} engines. "
            + " ".join(failures)
        )


async def _unload(engine: EngineClient, name: str) -> None:
    try:
        await engine.call(partial(convert.unload_lora, name=name, seconds=UNLOAD_SECONDS))
    except LoraNotFound:  # the engine has unloaded it for lack of memory
        return
    except LoraNotLoaded as error:
        raise LoraNotLoaded(f"Engine {engine.address} did not unload it: {error.message}") from None


def _raise_unexpected(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineUnavailable | LoraNotLoaded):
            raise result
