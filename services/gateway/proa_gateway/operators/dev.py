"""The routes of vLLM's development server, for operators: prefix cache, sleep and wake up, configuration.

They act on all engines, or on those of the query's `model`.
"""

import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic_core import to_json

from proa.options import masked
from proa_gateway.config import GatewayConfig
from proa_gateway.engines import convert
from proa_gateway.errors import UnsupportedField
from proa_gateway.gateway import gateway_of, require_operator
from proa_gateway.http.bodies import JsonRoute
from proa_gateway.http.errors import error_responses
from proa_gateway.operators.calls import call_engines

dev_router = APIRouter(
    route_class=JsonRoute,  # with --enable-dev-endpoints
    responses=error_responses(400, 401, 403, 404, 503),
    dependencies=[Depends(require_operator)],
)
QUICK_SECONDS = 10.0  # for calls that wait for no step
WAKE_UP_TAGS = {"weights", "kv_cache"}


@dev_router.post("/reset_prefix_cache", response_class=Response)
async def reset_prefix_cache(
    request: Request, model: str | None = None, reset_running_requests: bool = False, reset_external: bool = False
) -> Response:
    """Empty the prefix caches. Running requests continue, and add no more blocks to them."""
    for name, value in (("reset_running_requests", reset_running_requests), ("reset_external", reset_external)):
        if value:
            raise UnsupportedField(f"{name} is not supported.", param=name)
    gateway = gateway_of(request)
    seconds = gateway.config.deadlines.request  # engines answer between two steps, which may take minutes on a CPU
    await call_engines(gateway.pool, model, partial(convert.reset_prefix_cache, since=time.time(), seconds=seconds))
    return Response()


@dev_router.post("/sleep", response_class=Response)
async def sleep(
    request: Request,
    model: str | None = None,
    level: Annotated[int, Query(ge=1, le=2)] = 1,
    mode: Literal["abort", "wait"] = "abort",
) -> Response:
    """Free the engines' memory; answered when that is done. Level 1 keeps the weights in host memory, level 2 drops
    them. Unfinished requests are aborted, or waited for."""
    gateway = gateway_of(request)
    call = partial(
        convert.sleep,
        level=level,
        wait=mode == "wait",
        since=time.time(),
        seconds=gateway.config.deadlines.request,
    )
    await call_engines(gateway.pool, model, call)
    return Response()


@dev_router.post("/wake_up", response_class=Response)
async def wake_up(
    request: Request, model: str | None = None, tags: Annotated[list[str] | None, Query()] = None
) -> Response:
    """Get the engines' memory back; answered when they accept requests."""
    if tags and set(tags) != WAKE_UP_TAGS:
        raise UnsupportedField("tags must be weights and kv_cache, or none: they wake up together.", param="tags")
    gateway = gateway_of(request)
    await call_engines(gateway.pool, model, partial(convert.wake_up, seconds=gateway.config.deadlines.request))
    return Response()


@dev_router.get("/is_sleeping")
async def is_sleeping(request: Request, model: str | None = None) -> dict[str, bool]:
    """Whether all engines sleep, or are about to."""
    stats = await call_engines(gateway_of(request).pool, model, partial(convert.get_load, seconds=QUICK_SECONDS))
    return {"is_sleeping": all(each.sleep_level > 0 for each in stats.values())}


@dev_router.get("/server_info", response_model=dict[str, Any])
async def server_info(request: Request, model: str | None = None) -> Response:
    """The options of the gateway and, by address, the model and the options of each engine. Secrets are masked."""
    gateway = gateway_of(request)
    configs = await call_engines(gateway.pool, model, partial(convert.get_server_info, seconds=QUICK_SECONDS))
    infos = {each.address: each.hello.model for each in gateway.pool.engines if each.hello is not None}
    engines = {
        address: {"model_info": infos[address], "config": masked(config)}
        for address, config in configs.items()
        if address in infos
    }
    return Response(info_json(gateway.config, engines), media_type="application/json")


def info_json(config: GatewayConfig, engines: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The body of `/server_info`. Bytes are shown in hexadecimal, numbers that JSON lacks as texts."""
    info = {"version": version("proa-gateway"), "config": masked(config), "engines": engines}
    return to_json(info, bytes_mode="hex", inf_nan_mode="strings")
