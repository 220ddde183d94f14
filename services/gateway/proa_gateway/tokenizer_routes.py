"""The routes of models' tokenizers: vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`. They need no engine."""

from collections.abc import Iterator
from contextlib import contextmanager

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from proa_gateway.admission.auth import Caller
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import RateLimited
from proa_gateway.gateway import gateway_of
from proa_gateway.http import error_responses
from proa_gateway.json_body import JsonRoute
from proa_gateway.openai.tokenization import (
    REFUSED_IN_TOKENIZE,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    detokenize,
    tokenize,
)

tokenizer_router = APIRouter(route_class=JsonRoute)
tokenizer_info_router = APIRouter(route_class=JsonRoute)  # with --enable-tokenizer-info-endpoint
_ERRORS = error_responses(400, 401, 404, 413, 415, 429, 500, 503)


@tokenizer_router.post("/tokenize", response_model=TokenizeResponse, responses=_ERRORS)
async def tokenize_prompt(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text, or of a chat as `/v1/chat/completions` sends it to the model."""
    gateway = gateway_of(request)
    request.state.response_headers += gateway.extra_fields.check(body.__pydantic_extra__, REFUSED_IN_TOKENIZE)
    with admitted(request, body.model) as model:
        return _json(await tokenize(body, model, gateway.conversation_settings))


@tokenizer_router.post("/detokenize", response_model=DetokenizeResponse, responses=_ERRORS)
async def detokenize_tokens(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    with admitted(request, body.model) as model:
        return _json(await detokenize(body, model))


@tokenizer_info_router.get(
    "/tokenizer_info", response_model=TokenizerInfo, responses=error_responses(400, 401, 404, 503)
)
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    # Not `_json`: orjson has no integers of more than 64 bits, and model_max_length is often 10^30.
    return JSONResponse(gateway_of(request).admission.lookup.tokenizer_model(model).tokenizer.info)


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


def _json(body: dict[str, object]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
