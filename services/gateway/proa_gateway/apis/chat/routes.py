"""The routes of chat completions."""

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.chat.job import batch_call, chat_call
from proa_gateway.apis.chat.protocol import (
    BatchChatCompletionRequest,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
)
from proa_gateway.gateway import ERRORS, gateway_of, respond
from proa_gateway.http.bodies import JsonRoute
from proa_gateway.serving.envelope import generation_response

chat_router = APIRouter(route_class=JsonRoute)


@chat_router.post(
    "/v1/chat/completions",
    responses=ERRORS | {200: generation_response(ChatCompletion, ChatCompletionChunk)},
)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    return respond(chat_call(body, gateway_of(request).settings), request)


@chat_router.post("/v1/chat/completions/batch", response_model=ChatCompletion, responses=ERRORS)
async def chat_batch(body: BatchChatCompletionRequest, request: Request) -> Response:
    return respond(batch_call(body, gateway_of(request).settings), request)
