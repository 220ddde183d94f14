"""The routes of scores of pairs of texts, and of items by a token's probability."""

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.scores.generative import generative_scoring_call
from proa_gateway.apis.scores.job import rerank_call, score_call
from proa_gateway.apis.scores.protocol import (
    GenerativeScoringRequest,
    RankedDocuments,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from proa_gateway.gateway import ERRORS, gateway_of, respond
from proa_gateway.http.bodies import JsonRoute

scores_router = APIRouter(route_class=JsonRoute)


@scores_router.post("/score", response_model=ScoreList, responses=ERRORS)
@scores_router.post("/v1/score", response_model=ScoreList, responses=ERRORS)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score how well the two texts of each pair fit together."""
    return respond(score_call(body, gateway_of(request).settings), request)


@scores_router.post("/rerank", response_model=RankedDocuments, responses=ERRORS)
@scores_router.post("/v1/rerank", response_model=RankedDocuments, responses=ERRORS)
@scores_router.post("/v2/rerank", response_model=RankedDocuments, responses=ERRORS)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """The documents that fit a query best."""
    return respond(rerank_call(body, gateway_of(request).settings), request)


@scores_router.post("/generative_scoring", response_model=ScoreList, responses=ERRORS)
async def generative_scoring(body: GenerativeScoringRequest, request: Request) -> Response:
    """Score how likely a token is behind a query and each item."""
    return respond(generative_scoring_call(body, gateway_of(request).settings), request)
