"""The route of SGLang's native API."""

from fastapi import APIRouter, Request, Response

from proa_gateway.generate.handler import GenerateHandler
from proa_gateway.generate.protocol import GenerateBody
from proa_gateway.generate.response_schema import GENERATE_RESPONSE
from proa_gateway.generation_routes import ERRORS, generate
from proa_gateway.json_body import JsonRoute

generate_router = APIRouter(route_class=JsonRoute)


@generate_router.post("/generate", responses={**ERRORS, 200: GENERATE_RESPONSE})
async def generate_outputs(body: GenerateBody, request: Request) -> Response:
    return generate(GenerateHandler(body), request)
