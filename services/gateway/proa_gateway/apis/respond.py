"""What the routes of all APIs have in common."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastapi import Request

from proa_gateway.admission.auth import Caller
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import RateLimited
from proa_gateway.gateway import gateway_of
from proa_gateway.http.errors import error_responses
from proa_gateway.http.streaming import WriterResponse
from proa_gateway.serving.job import ApiCall

ERRORS = error_responses(400, 401, 404, 413, 415, 429, 500, 503, 504)


def respond(call: ApiCall, request: Request) -> WriterResponse:
    """The response that serving the call writes. Raises `UnsupportedField`."""
    gateway, state, fields = gateway_of(request), request.state, call.fields
    if fields.request_id is not None and "x-request-id" not in request.headers:
        state.request_id = fields.request_id
    state.model = fields.model  # for the access log
    if call.extra_fields:
        state.response_headers += gateway.notices.check_extra(call.extra_fields, call.endpoint.refused)
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
