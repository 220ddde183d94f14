"""The routes of decisions."""

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.decisions.job import decisions_call, system_one_call
from proa_gateway.apis.decisions.protocol import Decision, DecisionRequest
from proa_gateway.apis.decisions.system_one import SystemOneRequest, SystemOneResponse
from proa_gateway.gateway import ERRORS, gateway_of, respond
from proa_gateway.http.bodies import JsonRoute

decisions_router = APIRouter(route_class=JsonRoute)


@decisions_router.post("/v1/decisions", response_model=Decision, responses=ERRORS)
async def decisions(body: DecisionRequest, request: Request) -> Response:
    """Answer questions about one input by the probabilities of their options."""
    return respond(decisions_call(body, gateway_of(request).settings), request)


@decisions_router.post("/v1/systemone", response_model=SystemOneResponse, responses=ERRORS)
async def system_one(body: SystemOneRequest, request: Request) -> Response:
    """The same questions in TypeSafe's form."""
    return respond(system_one_call(body, gateway_of(request).settings), request)
