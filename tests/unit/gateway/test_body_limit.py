"""Large bodies are passed on one at a time, with turns of the event loop between them."""

import asyncio
from contextlib import suppress

import pytest
from starlette.types import Message, Receive, Scope, Send

from proa_gateway.http import LARGE_BODY, BodyLimit
from proa_gateway.large_bodies import LargeBodies

HTTP: Scope = {"type": "http", "headers": []}


async def bodies_and_others(num_bytes: int, count: int, parts: int = 1) -> str:
    """`b` for each body that the application gets and `o` for each turn that another task gets until the last one."""
    order: list[str] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        order.append("b")

    async def other() -> None:
        while True:
            order.append("o")
            await asyncio.sleep(0)

    async def send(message: Message) -> None: ...

    def receive() -> Receive:
        left = iter(range(parts - 1, -1, -1))

        async def part() -> Message:
            return {"type": "http.request", "body": b" " * (num_bytes // parts), "more_body": next(left) > 0}

        return part

    limit = BodyLimit(application, max_bytes=10 * num_bytes, large_bodies=LargeBodies())
    task = asyncio.create_task(other())
    await asyncio.gather(*(limit(HTTP, receive(), send) for _ in range(count)))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return "".join(order)


@pytest.mark.parametrize("parts", [1, 3])
async def test_others_have_a_turn_between_large_bodies(parts: int) -> None:
    order = await bodies_and_others(3 * LARGE_BODY, 5, parts)
    assert order.count("b") == 5
    assert "bb" not in order


async def test_small_bodies_do_not_wait_for_each_other() -> None:
    assert "bbbbb" in await bodies_and_others(LARGE_BODY - 1, 5)
