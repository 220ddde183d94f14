"""Request bodies: how much may arrive, in what time; large ones are passed on one at a time."""

import asyncio
from contextlib import suppress

import pytest
from starlette.types import Message, Receive, Scope, Send

from proa_gateway.errors import Overloaded, RequestTimeout
from proa_gateway.http.bodies import LARGE_BODY, UNFINISHED_BODIES, LargeBodies, RequestBodies
from proa_gateway.http.errors import ErrorForms

HTTP: Scope = {"type": "http", "path": "/v1/completions", "headers": []}


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

    limit = RequestBodies(application, max_bytes=10 * num_bytes, large_bodies=LargeBodies(), error_forms=ErrorForms())
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


class Sent:
    """The parts of a request's body. `ends`: the last of them is its end."""

    def __init__(self, *parts: bytes, ends: bool = True) -> None:
        self.parts = list(parts)
        self._ends = ends

    async def receive(self) -> Message:
        if not self.parts:
            await asyncio.Event().wait()
        part = self.parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self.parts) or not self._ends}

    async def send(self, message: Message) -> None: ...


async def read_body(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass


async def test_a_body_without_an_end_is_given_up() -> None:
    bodies = RequestBodies(read_body, 100, LargeBodies(), ErrorForms(), silence=0.01)
    sent = Sent(b"a", b"b", ends=False)
    with pytest.raises(RequestTimeout):
        await bodies(HTTP, sent.receive, sent.send)


async def test_a_body_that_goes_on_too_slowly_is_given_up() -> None:
    bodies = RequestBodies(read_body, 100, LargeBodies(), ErrorForms(), longest=0.0)
    sent = Sent(b"a", ends=False)
    with pytest.raises(RequestTimeout):
        await bodies(HTTP, sent.receive, sent.send)


async def test_a_complete_body_may_wait_for_its_response() -> None:
    async def respond_late(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, send)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await receive()  # until the client leaves

    sent = Sent(b"a")
    await RequestBodies(respond_late, 100, LargeBodies(), ErrorForms(), silence=0.01)(HTTP, sent.receive, sent.send)


async def test_the_sum_of_unfinished_bodies_is_bounded_and_freed() -> None:
    bodies = RequestBodies(read_body, 100, LargeBodies(), ErrorForms())
    unfinished = [Sent(b" " * 99, ends=False) for _ in range(UNFINISHED_BODIES)]
    tasks = [asyncio.create_task(bodies(HTTP, each.receive, each.send)) for each in unfinished]
    await asyncio.sleep(0)
    late = Sent(b" " * 99, ends=False)
    with pytest.raises(Overloaded):
        await bodies(HTTP, late.receive, late.send)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    sent = Sent(b" " * 99)
    await bodies(HTTP, sent.receive, sent.send)
