"""The gateway's HTTP routes. Each is a line or two over what it stands for."""

from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from proa_gateway.errors import ModelNotFound
from proa_gateway.gateway import Gateway
from proa_gateway.openai.endpoint_handler import EndpointHandler
from proa_gateway.openai.protocol import ChatCompletionRequest, CompletionRequest
from proa_gateway.openai.serving_chat import ChatHandler
from proa_gateway.openai.serving_completion import CompletionHandler
from proa_gateway.streaming import WriterResponse

router = APIRouter()
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ErrorDetail(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every error is wrapped in, in responses and in events of a stream."""

    error: ErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 415, 429, 500, 503, 504)
}


@router.post("/v1/chat/completions", responses=_ERRORS)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    return _generate(ChatHandler(body), request)


@router.post("/v1/completions", responses=_ERRORS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    return _generate(CompletionHandler(body), request)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    gateway = _gateway(request)
    return {"object": "list", "data": [_card(gateway, name) for name in gateway.serving.admission.model_names()]}


@router.get("/v1/models/{model:path}", responses={404: {"model": ErrorBody}})
async def get_model(model: str, request: Request) -> dict[str, Any]:
    gateway = _gateway(request)
    if model not in gateway.serving.admission.model_names():
        raise ModelNotFound(f"The model {model!r} does not exist.", param="model")
    return _card(gateway, model)


@router.get("/health")
async def health() -> Response:
    """The process is fine."""
    return Response()


@router.get("/ready", responses={503: {"description": "No engine can be used."}})
async def ready(request: Request) -> Response:
    """At least one engine can be used, or requests are held until one can be."""
    is_ready = _gateway(request).serving.admission.ready
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(_gateway(request).metrics.render(), media_type=METRICS_TYPE)


@router.get("/version")
async def get_version() -> dict[str, str]:
    return {"version": version("proa-gateway")}


def _generate(handler: EndpointHandler, request: Request) -> Response:
    serving, caller = _gateway(request).serving, request.state.caller
    return WriterResponse(partial(serving.respond, handler, caller, request.headers))


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.state.gateway
    return gateway


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    """Of a model that no engine has brought yet only the name is known."""
    model = gateway.models.get(name) if name in gateway.models.names() else None
    return {
        "id": name,
        "object": "model",
        "created": model.created if model is not None else gateway.started,
        "owned_by": "proa",
        "root": name,
        "parent": None,
        "max_model_len": model.info.max_model_len if model is not None else None,
    }
