"""Gateway: the parts of one gateway process, and what routes do with them."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request
from starlette.requests import HTTPConnection
from starlette.types import Scope

from proa_gateway.admission.auth import ApiKeyStore, Caller, authorization
from proa_gateway.admission.control import AdmissionControl
from proa_gateway.audio.loader import AudioLoader
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.models import ModelRegistry, ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import HeaderMissing, HostNotAllowed, InvalidApiKey, NotAnOperator, RateLimited
from proa_gateway.http.errors import error_responses
from proa_gateway.http.middleware import AllowedHosts
from proa_gateway.http.streaming import WriterResponse
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.routing.router import Router
from proa_gateway.serving.ignored_fields import Notices
from proa_gateway.serving.job import ApiCall, ApiSettings
from proa_gateway.serving.serving import Serving
from proa_gateway.serving.stored_responses import BackgroundTasks, ResponseStore

ERRORS = error_responses(400, 401, 404, 413, 415, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts that routes, middleware and the server use."""

    pool: EnginePool
    models: ModelRegistry
    router: Router
    metrics: GatewayMetrics
    admission: AdmissionControl
    serving: Serving
    api_keys: ApiKeyStore
    hosts: AllowedHosts
    config: GatewayConfig
    settings: ApiSettings
    responses: ResponseStore
    background: BackgroundTasks
    audios: AudioLoader
    notices: Notices
    started: int = field(default_factory=lambda: int(time.time()))  # Unix seconds


def gateway_of(request: HTTPConnection) -> Gateway:
    gateway: Gateway = request.state.gateway
    return gateway


def authenticate(scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
    """The `Authenticate` of `ApiKeyMiddleware`."""
    gateway: Gateway = scope["state"]["gateway"]
    try:
        if not gateway.api_keys.needs_key:
            gateway.hosts.check(headers.get(b"host", b"").decode("latin-1"))
        return gateway.api_keys.authenticate(authorization(headers))
    except (InvalidApiKey, HostNotAllowed) as error:
        gateway.metrics.observe_rejection("api_key" if isinstance(error, InvalidApiKey) else "host")
        raise


async def require_operator(request: HTTPConnection) -> None:
    """A route's dependency. Raises `NotAnOperator`, and `HeaderMissing` for a request that changes something and that
    any web page could send: without keys it needs a header for which browsers ask the gateway first (CORS)."""
    caller: Caller = request.state.caller
    if not gateway_of(request).api_keys.needs_key and request.scope["method"] != "GET":
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json" and "authorization" not in request.headers:
            raise HeaderMissing(
                f"Without API keys, {request.scope['method']} {request.url.path} needs the header Content-Type: "
                "application/json or Authorization, which no form of a web page can send."
            )
    if caller.role != "operator":
        raise NotAnOperator(
            "The endpoint needs an operator's key: one with that role in the key file, or --operator-key."
        )


def respond(call: ApiCall, request: Request) -> WriterResponse:
    """The response that serving the call writes. Raises `UnsupportedField`."""
    gateway, state, fields = gateway_of(request), request.state, call.fields
    if fields.request_id is not None and "x-request-id" not in request.headers:
        state.request_id = fields.request_id
    state.model = fields.model  # for the access log
    if call.extra_fields:
        state.response_headers += gateway.notices.check_extra(call.extra_fields, call.endpoint.refused)
    if call.warnings:
        state.response_headers += gateway.notices.warnings(call.warnings)
    return WriterResponse(partial(gateway.serving.respond, call, request))


@contextmanager
def admitted(request: Request, model: str | None) -> Iterator[ServedModel]:
    """The model of a request that needs no engine and counts against its API key's limits. Raises `GatewayError`."""
    gateway = gateway_of(request)
    caller: Caller = request.state.caller
    try:
        with caller.limiter.acquire():
            yield gateway.admission.lookup.tokenizer_model(model)
    except RateLimited:
        gateway.metrics.observe_rejection("rate_limit")
        raise
