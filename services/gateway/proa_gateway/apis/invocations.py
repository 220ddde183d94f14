"""SageMaker's route."""

from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Request, Response

from proa.contract import PoolingTask
from proa_gateway.apis.chat.protocol import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from proa_gateway.apis.chat.routes import chat_completions
from proa_gateway.apis.completions.protocol import Completion, CompletionRequest
from proa_gateway.apis.completions.routes import completions
from proa_gateway.apis.embeddings.protocol import (
    ClassifyRequest,
    ClassList,
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
)
from proa_gateway.apis.embeddings.routes import classify, embeddings, pooling
from proa_gateway.apis.scores.protocol import SCORE_FIELDS, RankedDocuments, RerankRequest, ScoreList, ScoreRequest
from proa_gateway.apis.scores.routes import rerank, score
from proa_gateway.errors import GatewayError
from proa_gateway.gateway import ERRORS, Gateway, gateway_of
from proa_gateway.http.bodies import JsonRoute
from proa_gateway.http.errors import validated
from proa_gateway.serving.envelope import generation_response

invocations_router = APIRouter(route_class=JsonRoute)


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


@invocations_router.post("/invocations", responses=ERRORS | {200: INVOKED}, openapi_extra={"requestBody": INVOCATION})
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


def only_tasks(gateway: Gateway, model: object) -> Collection[PoolingTask]:
    """The tasks of a model that only computes values. Empty: it generates text, or no engine has served it yet."""
    lookup = gateway.admission.lookup
    try:
        info = lookup.get(lookup.name(model if isinstance(model, str) else None)).info
    except GatewayError:
        return ()
    return info.pooling_tasks if info.pooling_only else ()
