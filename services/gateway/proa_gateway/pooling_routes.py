"""The routes of the endpoints that compute values from texts: embeddings, classes, scores of pairs."""

from collections.abc import Collection
from functools import partial

from fastapi import APIRouter, Request, Response

from proa.contract import PoolingTask
from proa_gateway.errors import GatewayError
from proa_gateway.gateway import Gateway, gateway_of
from proa_gateway.generation_routes import ERRORS, on_trace, use_request_id
from proa_gateway.json_body import JsonRoute
from proa_gateway.pooling.classify import ClassifyHandler
from proa_gateway.pooling.cohere import CohereEmbedHandler
from proa_gateway.pooling.embeddings import EmbeddingHandler, PoolingEndpointHandler
from proa_gateway.pooling.handler import PoolingHandler
from proa_gateway.pooling.late_chunking import LateChunkingHandler
from proa_gateway.pooling.protocol import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from proa_gateway.pooling.response_schema import (
    BYTES,
    ClassList,
    CohereEmbeddings,
    EmbeddingList,
    PoolingList,
    RankedDocuments,
    ScoreList,
)
from proa_gateway.pooling.scores import RerankHandler, ScoreHandler
from proa_gateway.streaming import WriterResponse

pooling_router = APIRouter(route_class=JsonRoute)


@pooling_router.post("/v1/embeddings", response_model=EmbeddingList, responses=ERRORS | BYTES)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    make = EmbeddingHandler if body.late_chunking_params is None else LateChunkingHandler
    return pool(make(body, gateway_of(request).conversation_settings), request)


@pooling_router.post("/pooling", response_model=PoolingList, responses=ERRORS | BYTES)
async def pooling(body: PoolingRequest, request: Request) -> Response:
    """The values of any task that the model has."""
    return pool(PoolingEndpointHandler(body, gateway_of(request).conversation_settings), request)


@pooling_router.post("/v2/embed", response_model=CohereEmbeddings, responses=ERRORS)
async def embed(body: CohereEmbedRequest, request: Request) -> Response:
    """Embeddings in Cohere's form."""
    return pool(CohereEmbedHandler(body), request)


@pooling_router.post("/classify", response_model=ClassList, responses=ERRORS)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    return pool(ClassifyHandler(body, gateway_of(request).conversation_settings), request)


@pooling_router.post("/score", response_model=ScoreList, responses=ERRORS)
@pooling_router.post("/v1/score", response_model=ScoreList, responses=ERRORS)
async def score(body: ScoreRequest, request: Request) -> Response:
    """How well each pair of texts fits together."""
    return pool(ScoreHandler(body), request)


@pooling_router.post("/rerank", response_model=RankedDocuments, responses=ERRORS)
@pooling_router.post("/v1/rerank", response_model=RankedDocuments, responses=ERRORS)
@pooling_router.post("/v2/rerank", response_model=RankedDocuments, responses=ERRORS)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """The documents that fit a query best."""
    return pool(RerankHandler(body), request)


def only_tasks(gateway: Gateway, model: object) -> Collection[PoolingTask]:
    """The tasks of a model that only computes values. Empty: it generates text, or no engine has served it yet."""
    lookup = gateway.admission.lookup
    try:
        info = lookup.get(lookup.name(model if isinstance(model, str) else None)).info
    except GatewayError:
        return ()
    return info.pooling_tasks if info.pooling_only else ()


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
