"""Routes about the gateway and its models: what is served, whether it is alive and ready, its metrics."""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from proa.contract import ModelInfo, SamplingParams
from proa.template_rules import THINKING_SWITCHES
from proa.tokenizer_files import SAMPLING_DEFAULTS
from proa_gateway.errors import ModelNotFound
from proa_gateway.gateway import Gateway, gateway_of
from proa_gateway.http.bodies import JsonRoute
from proa_gateway.http.errors import error_responses
from proa_gateway.tokenizer import Tokenizer

models_router = APIRouter(route_class=JsonRoute)
public_router = APIRouter(route_class=JsonRoute)  # routes that need no API key
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@models_router.get("/v1/models", responses=error_responses(401))
async def list_models(request: Request) -> dict[str, Any]:
    """List all models on one page. Each has the fields of OpenAI's and of Anthropic's API."""
    gateway = gateway_of(request)
    names = gateway.admission.lookup.names()
    page = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"object": "list", "data": [_model_card(gateway, name) for name in names], **page}


@models_router.get("/v1/models/{model:path}", responses=error_responses(401, 404))
async def get_model(model: str, request: Request) -> dict[str, Any]:
    gateway = gateway_of(request)
    if model not in gateway.admission.lookup.names():
        raise ModelNotFound(f"The model {model!r} does not exist.", param="model")
    return _model_card(gateway, model)


@public_router.get("/health", response_class=Response)
@public_router.get("/ping", response_class=Response)
@public_router.post("/ping", response_class=Response)
async def health() -> Response:
    """The process is alive."""
    return Response()


@public_router.get("/ready", responses={503: {"description": "No engine is usable."}})
async def ready(request: Request) -> Response:
    """An engine is usable, or requests wait until one is (scale from zero)."""
    is_ready = gateway_of(request).admission.ready
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


@public_router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """The generation requests of this gateway that are running or wait for an engine."""
    return {"server_load": gateway_of(request).admission.bounds.num_requests}


@public_router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    return Response(gateway_of(request).metrics.render(), media_type=METRICS_TYPE)


@public_router.get("/version")
async def get_version() -> dict[str, str]:
    return {"version": version("proa-gateway")}


def _model_card(gateway: Gateway, name: str) -> dict[str, Any]:
    """OpenAI's and Anthropic's model object; an adapter has its model as parent and its path as root, as in vLLM; the
    root of a model is its first name. Of a model that no engine has served yet, only the name is known."""
    lookup = gateway.admission.lookup
    base = lookup.base_name(lookup.name(name))
    lora = gateway.models.loras.get(name) if base != name else None
    model = gateway.models.get(base) if base in gateway.models.names() else None
    created = model.created if model is not None else gateway.started
    max_model_len = model.info.max_model_len if model is not None else None
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "owned_by": "proa",
        "root": base if lora is None else lora.lora.path,
        "parent": None if lora is None else base,
        "max_model_len": max_model_len,
        "max_input_tokens": max_model_len,
        "task": _task(model.info) if model is not None else None,
        "input_modalities": _modalities(model.info) if model is not None else ["text"],
        "thinking_switch": _thinking_switch(model.tokenizer) if model is not None else None,
        "reasoning_efforts": _reasoning_efforts(model.tokenizer) if model is not None else None,
        "default_sampling_params": _default_sampling(model.tokenizer) if model is not None else None,
    }


def _task(info: ModelInfo) -> str:
    """What engines do with the model's prompts: `generate`, `pool`, or `transcribe`, whose prompts are audio files."""
    if info.audios is not None and info.audios.cross_attention:
        return "transcribe"
    return "pool" if info.pooling_only else "generate"


def _modalities(info: ModelInfo) -> list[str]:
    present = {"text": True, "image": info.images is not None, "audio": info.audios is not None}
    return [name for name, is_present in present.items() if is_present]


def _default_sampling(tokenizer: Tokenizer) -> dict[str, float]:
    """What holds for requests without these fields: the model's own values, else those of the API."""
    params = SamplingParams(**tokenizer.sampling_defaults)
    return {name: getattr(params, name) for name in SAMPLING_DEFAULTS}


def _thinking_switch(tokenizer: Tokenizer) -> str | None:
    """The variable of the chat template that switches reasoning on or off, for `chat_template_kwargs`."""
    template = tokenizer.chat_template
    return next((name for name in THINKING_SWITCHES if template is not None and name in template.variables), None)


def _reasoning_efforts(tokenizer: Tokenizer) -> Sequence[str]:
    """The values of `reasoning_effort` that the chat template accepts; none: it does not read it."""
    return tokenizer.chat_template.rules.efforts if tokenizer.chat_template is not None else ()
