"""The routes of OpenAI's Responses API."""

import time
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response

from proa_gateway.admission.auth import Caller
from proa_gateway.apis.responses.items import Fields, Item
from proa_gateway.apis.responses.job import responses_call
from proa_gateway.apis.responses.protocol import REFUSED, ResponsesRequest
from proa_gateway.apis.responses.render import Keep, cancelled, new_response
from proa_gateway.apis.responses.response_schema import DELETED, ITEM_LIST, RESPONSE, RESPONSE_OR_EVENTS, InputTokens
from proa_gateway.apis.responses.store import OwnersResponses, generate_unseen, page
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.gateway import ERRORS, admitted, gateway_of, respond
from proa_gateway.http.bodies import JsonRoute
from proa_gateway.http.errors import error_responses
from proa_gateway.serving.conversation_call import ConversationCall

responses_router = APIRouter(route_class=JsonRoute)
_ERRORS = error_responses(400, 401, 404)


@responses_router.post("/v1/responses", responses={**ERRORS, 200: RESPONSE_OR_EVENTS})
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    stored = _stored(request)
    history = _history(stored, body)
    keep = stored.keep([*history, *body.input]) if body.keeps_response else _discard
    if keep is None:
        if body.background:
            message = "The input, with that of previous responses, is too large to be stored, as background needs."
            raise InvalidRequest(message, param="input")
        body, keep = body.model_copy(update={"store": False}), _discard
    call = responses_call(body, history, gateway_of(request).settings, keep)
    return _start(call, keep, body, request) if body.background else respond(call, request)


@responses_router.post("/v1/responses/input_tokens", response_model=InputTokens, responses=ERRORS)
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """The tokens of the prompt that a response with the same fields would have."""
    gateway = gateway_of(request)
    request.state.response_headers += gateway.notices.check_extra(body.extra_fields, REFUSED)
    request.state.response_headers += gateway.notices.warnings(body.warnings)
    history = _history(_stored(request), body)
    call = responses_call(body, history, gateway.settings, _discard)
    with admitted(request, body.model) as model:
        count = len(await call.reader.count(model))
    return _json(orjson.dumps({"object": "response.input_tokens", "input_tokens": count}))


@responses_router.get("/v1/responses/{response_id}", responses={**_ERRORS, 200: RESPONSE})
async def get_response(response_id: str, request: Request, stream: bool = False) -> Response:
    if stream:
        raise UnsupportedField("stream is not supported: the events of a response are not stored.", param="stream")
    return _json(_stored(request).response(response_id))


@responses_router.delete("/v1/responses/{response_id}", responses={**_ERRORS, 200: DELETED})
async def delete_response(response_id: str, request: Request) -> Response:
    await gateway_of(request).background.cancel((_owner(request), response_id))
    _stored(request).delete(response_id)
    return _json(orjson.dumps({"id": response_id, "object": "response", "deleted": True}))


@responses_router.post("/v1/responses/{response_id}/cancel", responses={**_ERRORS, 200: RESPONSE})
async def cancel_response(response_id: str, request: Request) -> Response:
    """A response that has ended stays as it is."""
    stored = _stored(request)
    await gateway_of(request).background.cancel((_owner(request), response_id))
    response: Fields = orjson.loads(stored.response(response_id))
    if not response["background"]:
        raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")
    if response["status"] in ("queued", "in_progress"):
        stored.replace(cancelled(response))
    return _json(stored.response(response_id))


@responses_router.get("/v1/responses/{response_id}/input_items", responses={**_ERRORS, 200: ITEM_LIST})
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items that the model was given, those of previous responses included."""
    items = _stored(request).input_items(response_id)
    return _json(orjson.dumps(page(items, limit=limit, order=order, after=after)))


def _history(stored: OwnersResponses, body: ResponsesRequest) -> list[Item]:
    """Return the items before those of the body."""
    return stored.history(body.previous_response_id) if body.previous_response_id else []


def _start(call: ConversationCall, keep: Keep, body: ResponsesRequest, request: Request) -> Response:
    """Answer with the queued response, and generate it in the background."""
    if not body.keeps_response:
        raise InvalidRequest("background can only be used when `store` is true.", param="background")
    if body.stream:
        message = "stream is not supported with background: fetch the response until it has ended."
        raise UnsupportedField(message, param="stream")
    call.check()
    answer = respond(call, request)
    id, background = call.endpoint.id_prefix + request.state.request_id, gateway_of(request).background
    if (_owner(request), id) in background:
        raise InvalidRequest(f"The response {id!r} is being generated: use another request id.", param="request_id")
    queued = new_response(body, id=id, created=int(time.time()), model=body.model or "")
    keep(queued)
    stored = _json(_stored(request).response(id))
    background.start((_owner(request), id), generate_unseen(answer.respond, queued, keep))
    return stored


def _owner(request: Request) -> str:
    caller: Caller = request.state.caller
    return caller.owner


def _stored(request: Request) -> OwnersResponses:
    return OwnersResponses(gateway_of(request).responses, _owner(request))


def _discard(response: Fields) -> None:
    """The `keep` of requests with store=false."""


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
