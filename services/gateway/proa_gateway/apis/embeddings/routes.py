"""The routes of the endpoints that return a model's values."""

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.embeddings.job import (
    ClassifyHandler,
    CohereEmbedHandler,
    EmbeddingHandler,
    PoolingEndpointHandler,
)
from proa_gateway.apis.embeddings.late_chunking import LateChunkingHandler
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
from proa_gateway.apis.respond import ERRORS, pool
from proa_gateway.gateway import gateway_of
from proa_gateway.http.bodies import JsonRoute

embeddings_router = APIRouter(route_class=JsonRoute)


@embeddings_router.post("/v1/embeddings", response_model=EmbeddingList, responses=ERRORS | BYTES)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    make = EmbeddingHandler if body.late_chunking_params is None else LateChunkingHandler
    return pool(make(body, gateway_of(request).conversation_settings), request)


@embeddings_router.post("/pooling", response_model=PoolingList, responses=ERRORS | BYTES)
async def pooling(body: PoolingRequest, request: Request) -> Response:
    """The values of any task that the model has."""
    return pool(PoolingEndpointHandler(body, gateway_of(request).conversation_settings), request)


@embeddings_router.post("/v2/embed", response_model=CohereEmbeddings, responses=ERRORS)
async def embed(body: CohereEmbedRequest, request: Request) -> Response:
    """Embeddings in Cohere's form."""
    return pool(CohereEmbedHandler(body), request)


@embeddings_router.post("/classify", response_model=ClassList, responses=ERRORS)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    return pool(ClassifyHandler(body, gateway_of(request).conversation_settings), request)
