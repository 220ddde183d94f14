"""What the routes of all generation endpoints have in common."""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from fastapi import Request, Response
from starlette.datastructures import State

from proa_gateway.admission.auth import Caller
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import RateLimited
from proa_gateway.gateway import gateway_of
from proa_gateway.http.errors import error_responses
from proa_gateway.http.streaming import ResponseWriter, WriterResponse
from proa_gateway.pooling.serving import PoolingHandler
from proa_gateway.serving.endpoint_handler import EndpointHandler

TRACE_ID_HEADER: Final = b"x-trace-id"
ERRORS = error_responses(400, 401, 404, 413, 415, 429, 500, 503, 504)


def generate(handler: EndpointHandler, request: Request) -> Response:
    """The response that the handler's generation writes. Raises `UnsupportedField`."""
    return WriterResponse(generation(handler, request))


def generation(handler: EndpointHandler, request: Request) -> Callable[[ResponseWriter], Coroutine[Any, Any, None]]:
    """Writes the handler's response. Raises `UnsupportedField`."""
    gateway, state, body = gateway_of(request), request.state, handler.request
    use_request_id(request, body.request_id)
    state.model = body.model
    state.response_headers += gateway.extra_fields.check(handler.extra_fields, handler.refused)
    return partial(
        gateway.serving.respond,
        handler,
        state.caller,
        state.request_id,
        request.headers,
        state.response_headers,
        partial(on_trace, state),
        partial(setattr, state, "error_type"),  # for the access log
    )


def use_request_id(request: Request, request_id: str | None) -> None:
    """Use the id in the request's body, unless it has none or a header has another one."""
    if request_id is not None and "x-request-id" not in request.headers:
        request.state.request_id = request_id


def on_trace(state: State, trace_id: str) -> None:
    """Name the trace in the response and in the access log."""
    state.trace_id = trace_id
    state.response_headers.append((TRACE_ID_HEADER, trace_id.encode()))


def on_ignored(request: Request) -> Callable[[Sequence[str]], None]:
    """Names these fields in a header of the request's response."""
    gateway, headers = gateway_of(request), request.state.response_headers

    def add_header(fields: Sequence[str]) -> None:
        headers.extend(gateway.extra_fields.ignored(fields))

    return add_header


def pool(handler: PoolingHandler, request: Request) -> Response:
    """The response that the handler writes. Raises `UnsupportedField`."""
    gateway, state = gateway_of(request), request.state
    use_request_id(request, handler.request.request_id)
    request.state.model = handler.request.model
    state.response_headers += gateway.extra_fields.check(handler.request.extra_fields, handler.refused)
    return WriterResponse(
        partial(
            gateway.pooling.respond,
            handler,
            state.caller,
            state.request_id,
            request.headers,
            partial(on_trace, state),
        )
    )


@contextmanager
def admitted(request: Request, model: str | None) -> Iterator[ServedModel]:
    """The model of a request that counts against its API key's limits. Raises `GatewayError`."""
    gateway = gateway_of(request)
    caller: Caller = request.state.caller
    try:
        lease = caller.limiter.acquire()
    except RateLimited:
        gateway.metrics.observe_rejection("rate_limit")
        raise
    with lease:
        yield gateway.admission.lookup.tokenizer_model(model)
