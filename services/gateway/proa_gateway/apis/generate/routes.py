"""The route of SGLang's native API."""

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.generate.job import GenerateHandler
from proa_gateway.apis.generate.protocol import GENERATE_RESPONSE, GenerateBody
from proa_gateway.apis.respond import ERRORS, generate
from proa_gateway.http.bodies import JsonRoute

generate_router = APIRouter(route_class=JsonRoute)


@generate_router.post("/generate", responses={**ERRORS, 200: GENERATE_RESPONSE})
async def generate_outputs(body: GenerateBody, request: Request) -> Response:
    return generate(GenerateHandler(body), request)
