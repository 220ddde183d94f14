"""The application factory: a FastAPI application around one gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Scope

from proa_gateway.admission.auth import ApiKeyMiddleware, Caller
from proa_gateway.config import GatewayConfig
from proa_gateway.errors import InvalidApiKey
from proa_gateway.gateway import Gateway, open_gateway
from proa_gateway.http import BodyLimit, error_handlers
from proa_gateway.routes import router
from proa_gateway.streaming import ServerSendMiddleware


def create_app(config: GatewayConfig) -> ASGIApp:
    """The gateway runs from the application's start-up to its shutdown."""
    return ServerSendMiddleware(create_fastapi(config))


def create_fastapi(config: GatewayConfig) -> FastAPI:
    """The application that `create_app` wraps; its routes are the API's description."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Gateway]]:
        async with open_gateway(config) as gateway:
            yield {"gateway": gateway}

    app = FastAPI(
        title="Proa",
        version=version("proa-gateway"),
        lifespan=lifespan,
        exception_handlers=error_handlers(_observe_error),  # type: ignore[arg-type]
    )
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(ApiKeyMiddleware, authenticate=_authenticate)  # runs before BodyLimit
    app.include_router(router)
    return app


def _authenticate(scope: Scope, authorization: str | None) -> Caller:
    gateway: Gateway = scope["state"]["gateway"]
    try:
        return gateway.api_keys.authenticate(authorization)
    except InvalidApiKey:
        gateway.metrics.observe_rejection("api_key")
        raise


def _observe_error(request: Request, status: int, error_type: str) -> None:
    gateway: Gateway = request.state.gateway
    route = request.scope.get("route")
    gateway.metrics.observe_request(getattr(route, "path", "none"), status, error_type)
