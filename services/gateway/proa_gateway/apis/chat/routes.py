"""The routes of chat completions."""

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.chat.job import BatchChatHandler, ChatHandler
from proa_gateway.apis.chat.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from proa_gateway.apis.chat.response_schema import ChatCompletion, ChatCompletionChunk
from proa_gateway.apis.respond import ERRORS, generate, on_ignored
from proa_gateway.gateway import gateway_of
from proa_gateway.http.bodies import JsonRoute
from proa_gateway.serving.openai_schema import generation_response

chat_router = APIRouter(route_class=JsonRoute)


@chat_router.post(
    "/v1/chat/completions",
    responses=ERRORS | {200: generation_response(ChatCompletion, ChatCompletionChunk)},
)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    handler = ChatHandler(body, gateway_of(request).conversation_settings, on_ignored=on_ignored(request))
    return generate(handler, request)


@chat_router.post("/v1/chat/completions/batch", response_model=ChatCompletion, responses=ERRORS)
async def chat_batch(body: BatchChatCompletionRequest, request: Request) -> Response:
    handler = BatchChatHandler(body, gateway_of(request).conversation_settings, on_ignored=on_ignored(request))
    return generate(handler, request)
