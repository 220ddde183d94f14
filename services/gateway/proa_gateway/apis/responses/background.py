"""Responses that are generated after their request has been answered."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Message

from proa_gateway.apis.responses.items import Fields
from proa_gateway.apis.responses.render import Keep, failed
from proa_gateway.errors import GatewayError, InternalError
from proa_gateway.http.streaming import ResponseWriter

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
