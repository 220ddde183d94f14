"""The stored responses of one owner, and those that are generated after their request has been answered."""

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import orjson
from starlette.types import Message

from proa_gateway.apis.responses.items import Fields, Item, listed, parsed
from proa_gateway.apis.responses.render import Keep, failed
from proa_gateway.errors import (
    GatewayError,
    InternalError,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
)
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.serving.stored_responses import ResponseStore, StoredResponse

MAX_PARTS = 2048
"""Limit of items and their parts in a stored input, which each response that continues it reads again in 20 ms."""


class OwnersResponses:
    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner

    def response(self, id: str) -> bytes:
        """The response object as JSON. Raises `ResponseNotFound`."""
        return self._find(id).response

    def input_items(self, id: str) -> list[Fields]:
        items: list[Fields] = orjson.loads(self._find(id).input_items)
        return items

    def history(self, id: str) -> list[Item]:
        """Return the items before those of a response that continues this one. Raises `PreviousResponseNotFound`, and
        `InvalidRequest` if it has not ended."""
        found = self._store.get(self._owner, id)
        if found is None:
            raise PreviousResponseNotFound(_not_found(id), param="previous_response_id")
        response = orjson.loads(found.response)
        if response["status"] not in ("completed", "incomplete"):
            message = f"The response {id!r} cannot be continued: its status is {response['status']!r}."
            raise InvalidRequest(message, param="previous_response_id")
        return parsed(orjson.loads(found.input_items) + response["output"])

    def keep(self, input_items: Sequence[Item]) -> Keep | None:
        """A function that stores a response to these items. None: they are too large to be stored."""
        input_json = orjson.dumps(listed(input_items))
        # Items and parts have a type. Within a text, the quotes would be escaped.
        if input_json.count(b'"type":"') > MAX_PARTS or not self._store.fits(len(input_json)):
            return None

        def put(response: Fields) -> None:
            self._store.put(self._owner, response["id"], StoredResponse(orjson.dumps(response), input_json))

        return put

    def replace(self, response: Fields) -> None:
        """Store a newer state of a response."""
        found = self._find(response["id"])
        self._store.put(self._owner, response["id"], StoredResponse(orjson.dumps(response), found.input_items))

    def delete(self, id: str) -> None:
        self._find(id)
        self._store.delete(self._owner, id)

    def _find(self, id: str) -> StoredResponse:
        stored = self._store.get(self._owner, id)
        if stored is None:
            raise ResponseNotFound(_not_found(id), param="response_id")
        return stored


def _not_found(id: str) -> str:
    return (
        f"Response with id {id[:100]!r} not found: it was made with store=false or by another gateway process, was too"
        " large to be stored, or newer responses have taken its place."
    )


def page(items: Sequence[Fields], *, limit: int, order: Literal["asc", "desc"], after: str | None) -> Fields:
    """OpenAI's list object with up to `limit` items that come after the one with the id `after`."""
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest(f"after names the item {after[:100]!r}, which is not in the input.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    data = ordered[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > limit,
    }


Respond = Callable[[ResponseWriter], Coroutine[Any, Any, None]]
_log = logging.getLogger(__name__)


async def generate_unseen(respond: Respond, queued: Fields, keep: Keep) -> None:
    """`respond` stores its response itself; without a client, what it writes is dropped. An error is stored in
    `queued`."""
    try:
        await respond(ResponseWriter(_drop, _NoConnection()))
    except GatewayError as error:
        keep(failed(queued, error))
    except Exception:
        _log.exception("%s failed in the background", queued["id"])
        keep(failed(queued, InternalError("The gateway failed.")))


async def _drop(message: Message) -> None:
    pass


class _NoConnection:
    """The `Connection` of a response that nobody reads."""

    writer: ResponseWriter | None = None

    @property
    def transport(self) -> "_NoConnection":
        return self

    def write(self, data: bytes) -> None:
        pass
