"""The gateway's HTTP routes: those of OpenAI and of operators, and the routers of the other APIs."""

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from proa.contract import PoolingTask
from proa_gateway.errors import ModelNotFound
from proa_gateway.gateway import Gateway, gateway_of
from proa_gateway.generate.routes import generate_router
from proa_gateway.generation_routes import ERRORS, generate, on_ignored
from proa_gateway.http import error_responses, validated
from proa_gateway.json_body import JsonRoute
from proa_gateway.messages.routes import messages_router
from proa_gateway.openai.chat_batch import BatchChatCompletionRequest, BatchChatHandler
from proa_gateway.openai.protocol import ChatCompletionRequest, CompletionRequest
from proa_gateway.openai.response_schema import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    generation_response,
)
from proa_gateway.openai.serving_chat import ChatHandler
from proa_gateway.openai.serving_completion import CompletionHandler
from proa_gateway.pooling.protocol import (
    SCORE_FIELDS,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from proa_gateway.pooling.response_schema import ClassList, EmbeddingList, PoolingList, RankedDocuments, ScoreList
from proa_gateway.pooling_routes import classify, embeddings, only_tasks, pooling, pooling_router, rerank, score
from proa_gateway.responses.routes import responses_router
from proa_gateway.tokenizer_routes import tokenizer_router

router = APIRouter(route_class=JsonRoute)
public_router = APIRouter(route_class=JsonRoute)  # routes that need no API key
ROUTERS = (
    router,
    tokenizer_router,
    messages_router,
    responses_router,
    generate_router,
    pooling_router,
    public_router,
)
INVOCATION = {
    "content": {
        "application/json": {
            "schema": {
                "anyOf": [
                    {"$ref": "#/components/schemas/ChatCompletionRequest"},
                    {"$ref": "#/components/schemas/CompletionRequest"},
                    {"$ref": "#/components/schemas/EmbeddingRequest"},
                    {"$ref": "#/components/schemas/ClassifyRequest"},
                    {"$ref": "#/components/schemas/PoolingRequest"},
                    {"$ref": "#/components/schemas/ScoreRequest"},
                    {"$ref": "#/components/schemas/RerankRequest"},
                ]
            }
        }
    }
}
INVOKED: dict[str, Any] = {
    **generation_response(ChatCompletion, ChatCompletionChunk),
    "model": ChatCompletion | Completion | EmbeddingList | ClassList | PoolingList | ScoreList | RankedDocuments,
}
_EMBEDDINGS = {PoolingTask.EMBED, PoolingTask.TOKEN_EMBED}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.post(
    "/v1/chat/completions",
    responses=ERRORS | {200: generation_response(ChatCompletion, ChatCompletionChunk)},
)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    handler = ChatHandler(body, gateway_of(request).conversation_settings, on_ignored=on_ignored(request))
    return generate(handler, request)


@router.post("/v1/chat/completions/batch", response_model=ChatCompletion, responses=ERRORS)
async def chat_batch(body: BatchChatCompletionRequest, request: Request) -> Response:
    handler = BatchChatHandler(body, gateway_of(request).conversation_settings, on_ignored=on_ignored(request))
    return generate(handler, request)


@router.post("/v1/completions", responses=ERRORS | {200: generation_response(Completion, CompletionChunk)})
async def completions(body: CompletionRequest, request: Request) -> Response:
    return generate(CompletionHandler(body), request)


@router.post("/invocations", responses=ERRORS | {200: INVOKED}, openapi_extra={"requestBody": INVOCATION})
async def invocations(body: dict[str, Any], request: Request) -> Response:
    """SageMaker's route: the endpoint follows from the body's fields, and from the model if it generates nothing."""
    if "messages" in body or "input" in body:
        tasks = only_tasks(gateway_of(request), body.get("model"))
        if tasks and _EMBEDDINGS.isdisjoint(tasks):
            if PoolingTask.CLASSIFY in tasks:
                return await classify(validated(ClassifyRequest, body), request)
            return await pooling(validated(PoolingRequest, body), request)
        if tasks or "input" in body or "encoding_format" in body:
            return await embeddings(validated(EmbeddingRequest, body), request)
        return await chat_completions(validated(ChatCompletionRequest, body), request)
    if "query" in body:
        return await rerank(validated(RerankRequest, body), request)
    if SCORE_FIELDS & body.keys():
        return await score(validated(ScoreRequest, body), request)
    return await completions(validated(CompletionRequest, body), request)


@router.get("/v1/models", responses=error_responses(401))
async def list_models(request: Request) -> dict[str, Any]:
    """All models on one page. Beside OpenAI's fields stand those that Anthropic's clients read."""
    gateway = gateway_of(request)
    names = gateway.admission.lookup.names()
    page = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"object": "list", "data": [_model_card(gateway, name) for name in names], **page}


@router.get("/v1/models/{model:path}", responses=error_responses(401, 404))
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
    """OpenAI's and Anthropic's model object; an adapter has its model as parent and its path as root, as in vLLM. Of a
    model that no engine has served yet, only the name is known."""
    lookup = gateway.admission.lookup
    base = lookup.base_name(name)
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
        "root": name if lora is None else lora.lora.path,
        "parent": None if lora is None else base,
        "max_model_len": max_model_len,
        "max_input_tokens": max_model_len,
        "input_modalities": ["text", "image"] if model is not None and model.info.images else ["text"],
    }
