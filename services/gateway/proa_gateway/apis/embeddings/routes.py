"""The routes of the endpoints that return a model's values."""

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.embeddings.job import classify_call, cohere_call, embeddings_call, pooling_call
from proa_gateway.apis.embeddings.protocol import (
    BYTES,
    ClassifyRequest,
    ClassList,
    CohereEmbeddings,
    CohereEmbedRequest,
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
)
from proa_gateway.gateway import ERRORS, gateway_of, respond
from proa_gateway.http.bodies import JsonRoute

embeddings_router = APIRouter(route_class=JsonRoute)


@embeddings_router.post("/v1/embeddings", response_model=EmbeddingList, responses=ERRORS | BYTES)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    return respond(embeddings_call(body, gateway_of(request).settings), request)


@embeddings_router.post("/pooling", response_model=PoolingList, responses=ERRORS | BYTES)
async def pooling(body: PoolingRequest, request: Request) -> Response:
    """The values of any task that the model has."""
    return respond(pooling_call(body, gateway_of(request).settings), request)


@embeddings_router.post("/v2/embed", response_model=CohereEmbeddings, responses=ERRORS)
async def embed(body: CohereEmbedRequest, request: Request) -> Response:
    """Embeddings in Cohere's form."""
    return respond(cohere_call(body, gateway_of(request).settings), request)


@embeddings_router.post("/classify", response_model=ClassList, responses=ERRORS)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    return respond(classify_call(body, gateway_of(request).settings), request)
