"""LargeBodies: one at a time, and how long the oldest has waited."""

import asyncio

import pytest

from proa_gateway.http.bodies import LargeBodies


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_the_delay_is_that_of_the_oldest_body_that_waits() -> None:
    clock = Clock()
    bodies = LargeBodies(clock)
    assert bodies.delay() == 0.0
    first = asyncio.create_task(bodies.turn())
    await asyncio.sleep(0)  # it has the turn
    clock.now = 3.0
    second = asyncio.create_task(bodies.turn())
    await asyncio.sleep(0)
    clock.now = 5.0
    await first
    assert bodies.delay() == 2.0
    await second
    assert bodies.delay() == 0.0


async def test_a_body_whose_client_left_does_not_wait() -> None:
    bodies = LargeBodies(clock := Clock())
    first, left = (asyncio.create_task(bodies.turn()) for _ in range(2))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    await first
    clock.now = 9.0
    assert bodies.delay() == 0.0


async def test_none_waits_once_all_are_passed_on() -> None:
    bodies = LargeBodies()
    await bodies.none_waits()
    turns = [asyncio.create_task(bodies.turn()) for _ in range(3)]
    await asyncio.sleep(0)
    turns[1].cancel()
    await bodies.none_waits()
    assert all(turn.done() for turn in turns)
    await bodies.none_waits()
