"""The route of completions."""

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.completions.job import completion_call
from proa_gateway.apis.completions.protocol import Completion, CompletionChunk, CompletionRequest
from proa_gateway.gateway import ERRORS, gateway_of, respond
from proa_gateway.http.bodies import JsonRoute
from proa_gateway.serving.envelope import generation_response

completions_router = APIRouter(route_class=JsonRoute)


@completions_router.post("/v1/completions", responses=ERRORS | {200: generation_response(Completion, CompletionChunk)})
async def completions(body: CompletionRequest, request: Request) -> Response:
    return respond(completion_call(body, gateway_of(request).settings), request)
