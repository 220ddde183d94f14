"""The FastAPI application around one gateway: routes, middleware, exception handlers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route

from proa_gateway.admission.auth import ApiKeyMiddleware
from proa_gateway.apis.audio.routes import AUDIO_PATHS
from proa_gateway.apis.models import public_router
from proa_gateway.apis.routes import ERROR_FORMS, ROUTERS
from proa_gateway.apis.tokenize import tokenizer_info_router
from proa_gateway.audio.memory import AudioMemory
from proa_gateway.config import GatewayConfig
from proa_gateway.gateway import Gateway, authenticate, gateway_of
from proa_gateway.http.bodies import BodyLimits, LargeBodies, RequestBodies
from proa_gateway.http.errors import error_handlers
from proa_gateway.http.forms import FIELD_BYTES
from proa_gateway.http.middleware import AccessLogMiddleware, HeadAsGet, Paths, RequestIdMiddleware
from proa_gateway.open_gateway import open_gateway
from proa_gateway.operators.dev import dev_router
from proa_gateway.operators.lora import lora_router
from proa_gateway.page import page_router

# What pages of other origins may read.
EXPOSED_HEADERS = (
    "x-request-id",
    "x-trace-id",
    "x-proa-ignored-fields",
    "x-proa-warnings",
    "retry-after",
)


def create_app(config: GatewayConfig) -> FastAPI:
    """The gateway runs from the application's startup to its shutdown. Streams need a server whose ASGI scope has a
    `Connection`, see `HttpProtocol`."""

    large_bodies = LargeBodies()
    audio_memory = AudioMemory(config.audio.max_audio_memory)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Gateway]]:
        async with open_gateway(config, large_bodies, audio_memory) as gateway:
            yield {"gateway": gateway}

    app = FastAPIOffline(  # pages at /docs and /redoc whose scripts come from the gateway
        title="Proa",
        version=version("proa-gateway"),
        lifespan=lifespan,
        routes=_routes(config),
        redirect_slashes=False,  # `Paths` answers both
        exception_handlers=error_handlers(_observe_error, ERROR_FORMS),
    )
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]
    app.add_middleware(HeadAsGet)
    audio_limits = BodyLimits(config.audio.max_audio_bytes + FIELD_BYTES, audio_memory, is_json=False)
    app.add_middleware(
        RequestBodies,
        max_bytes=config.max_body_bytes,
        large_bodies=large_bodies,
        error_forms=ERROR_FORMS,
        forms=dict.fromkeys(AUDIO_PATHS, audio_limits),
    )
    public_routes = [*public_router.routes, *page_router.routes]
    public_paths = frozenset(route.path for route in public_routes if isinstance(route, Route))
    # The last one runs first. A request without a valid key is rejected before its body is read, with its request id.
    app.add_middleware(ApiKeyMiddleware, authenticate=authenticate, public_paths=public_paths, error_forms=ERROR_FORMS)
    if config.access_log:
        app.add_middleware(AccessLogMiddleware)
    app.add_middleware(RequestIdMiddleware, error_forms=ERROR_FORMS)
    app.add_middleware(Paths, root_path=config.root_path)
    if config.cors.allowed_origins.values:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors.allowed_origins.values,
            allow_credentials=config.cors.allow_credentials,
            allow_methods=config.cors.allowed_methods.values,
            allow_headers=config.cors.allowed_headers.values,
            expose_headers=EXPOSED_HEADERS,
        )
    return app


def _routes(config: GatewayConfig) -> list[BaseRoute]:
    optional = (
        (tokenizer_info_router, config.enable_tokenizer_info_endpoint),
        (lora_router, config.enable_runtime_lora_updating),
        (dev_router, config.enable_dev_endpoints),
    )
    routers = [*ROUTERS, page_router, *(router for router, is_enabled in optional if is_enabled)]
    # Not by `include_router`, which makes each route and the models of its responses again at the first request.
    return [route for router in routers for route in router.routes]


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document without its validation errors, status 422: they are sent as OpenAI's, status 400."""
    document = FastAPI.openapi(app)
    for routes in document["paths"].values():
        for route in routes.values():
            route["responses"].pop("422", None)
    return document


def _observe_error(request: Request, status: int, error_type: str) -> None:
    request.state.error_type = error_type
    route = request.scope.get("route")
    gateway_of(request).metrics.observe_request(getattr(route, "path", "none"), status, error_type)
