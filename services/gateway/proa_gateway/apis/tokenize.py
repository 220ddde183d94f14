"""vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`: texts and chats to token ids, and back."""

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.engines.models import ServedModel
from proa_gateway.gateway import admitted, gateway_of
from proa_gateway.http.bodies import JsonRoute
from proa_gateway.http.errors import error_responses
from proa_gateway.serving.conversation import Messages, TemplateFields
from proa_gateway.serving.conversation_call import ConversationReader
from proa_gateway.serving.fields import ModelName, Text, TokenIds
from proa_gateway.serving.generation_request import GenerationRequest, check_token_ids
from proa_gateway.serving.ignored_fields import REFUSED_IN_CHAT, Refused
from proa_gateway.serving.job import ApiSettings
from proa_gateway.serving.prompt import MAX_COUNTED_TOKENS, check_text_fits
from proa_gateway.serving.tools.offers import offered_fields

# Fields that would change the tokens of a chat. The others of generation requests are ignored.
REFUSED_IN_TOKENIZE: Mapping[str, Refused] = {
    "truncate_prompt_tokens": Refused("all tokens are returned"),
    **{name: REFUSED_IN_CHAT[name] for name in ("functions", "media_io_kwargs", "mm_processor_kwargs")},
}
_TEMPLATE_FIELDS = (
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tools",
)
_MODEL = Field(None, description="May be omitted if only one model is served.")
_ERRORS = error_responses(400, 401, 404, 413, 415, 429, 500, 503)


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: a text in `prompt`, or a chat in `messages`; the fields after it are the chat template's."""

    model_config = ConfigDict(
        extra="allow",
        protected_namespaces=(),
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    )
    __pydantic_extra__: dict[str, Any]

    model: ModelName | None = _MODEL
    add_special_tokens: bool | None = Field(None, description="Default: true for a text, false for a chat.")
    return_token_strs: bool | None = None
    prompt: Text | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("invalid_value", "must have either prompt or messages")
        given = [name for name in _TEMPLATE_FIELDS if getattr(self, name)]
        if given and self.prompt is not None:
            raise PydanticCustomError("invalid_value", "has {name}, which needs messages", {"name": given[0]})
        return self


class TokenizeResponse(BaseModel):
    """`token_strs`: null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]  # their ids
    token_strs: list[str] | None


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`. Special tokens are part of the text."""

    model_config = ConfigDict(protected_namespaces=())

    model: ModelName | None = _MODEL
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """The fields of the model's tokenizer_config.json, and the chat template in use."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str


async def tokenize(request: TokenizeRequest, model: ServedModel, settings: ApiSettings) -> dict[str, object]:
    """A `TokenizeResponse`. Raises `InvalidRequest`."""
    if request.prompt is None:
        fields = GenerationRequest.model_construct(add_special_tokens=request.add_special_tokens)
        conversation = request.conversation(request.messages or ())
        reader = ConversationReader(conversation=conversation, request=fields, settings=settings)
        tokens = list(await reader.count(model))
    else:
        special = request.add_special_tokens is not False
        await check_text_fits(request.prompt, model, MAX_COUNTED_TOKENS, "prompt")
        tokens = await model.tokenizer.encode(request.prompt, add_special_tokens=special)
    return {
        "count": len(tokens),
        "max_model_len": model.info.max_model_len,
        "tokens": tokens,
        "token_strs": await model.tokenizer.token_strs(tokens) if request.return_token_strs else None,
    }


async def detokenize(request: DetokenizeRequest, model: ServedModel) -> dict[str, object]:
    """A `DetokenizeResponse`. Raises `InvalidRequest` for a token that is not in the vocabulary."""
    check_token_ids("tokens", request.tokens, model.info)
    return {"prompt": await model.tokenizer.detokenize(request.tokens)}


tokenizer_router = APIRouter(route_class=JsonRoute)
tokenizer_info_router = APIRouter(route_class=JsonRoute)  # with --enable-tokenizer-info-endpoint


@tokenizer_router.post("/tokenize", response_model=TokenizeResponse, responses=_ERRORS)
async def tokenize_prompt(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text, or of a chat as `/v1/chat/completions` sends it to the model."""
    gateway = gateway_of(request)
    extra = body.__pydantic_extra__ | offered_fields(body.tools or ())
    request.state.response_headers += gateway.notices.check_extra(extra, REFUSED_IN_TOKENIZE)
    with admitted(request, body.model) as model:
        return _json(await tokenize(body, model, gateway.settings))


@tokenizer_router.post("/detokenize", response_model=DetokenizeResponse, responses=_ERRORS)
async def detokenize_tokens(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    with admitted(request, body.model) as model:
        return _json(await detokenize(body, model))


@tokenizer_info_router.get(
    "/tokenizer_info", response_model=TokenizerInfo, responses=error_responses(400, 401, 404, 503)
)
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    # Not `_json`: orjson has no integers of more than 64 bits, and model_max_length is often 10^30.
    return JSONResponse(gateway_of(request).admission.lookup.tokenizer_model(model).tokenizer.info)


def _json(body: dict[str, object]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
