"""The route of SGLang's native API."""

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.generate.job import generate_call
from proa_gateway.apis.generate.protocol import GENERATE_RESPONSE, GenerateBody
from proa_gateway.gateway import ERRORS, gateway_of, respond
from proa_gateway.http.bodies import JsonRoute

generate_router = APIRouter(route_class=JsonRoute)


@generate_router.post("/generate", responses={**ERRORS, 200: GENERATE_RESPONSE})
async def generate_outputs(body: GenerateBody, request: Request) -> Response:
    return respond(generate_call(body, gateway_of(request).settings), request)
