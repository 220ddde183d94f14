"""Deadlines of exchanges: of the whole, and of each unit in it."""

import socket
from io import BufferedReader

import pytest

from proa_engine.mover.deadline import Deadline, TimedReader, send_all


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_whole_exchange_has_a_limit() -> None:
    clock = Clock()
    deadline = Deadline(10.0, clock=clock)
    clock.now += 9.0
    assert deadline.left() == pytest.approx(1.0)
    clock.now += 1.0
    with pytest.raises(TimeoutError, match="it took longer than 10 s"):
        deadline.left()


def test_a_unit_that_ends_begins_the_time_of_the_next_one_within_the_limit_of_all() -> None:
    clock = Clock()
    deadline = Deadline(10.0, 4.0, clock=clock)
    for _ in range(3):
        clock.now += 3.0
        assert deadline.left() == pytest.approx(1.0)
        deadline.end_unit()
    assert deadline.left() == pytest.approx(1.0), "of the whole exchange"


def test_a_unit_has_a_limit() -> None:
    clock = Clock()
    deadline = Deadline(10.0, 4.0, clock=clock)
    clock.now += 4.0
    with pytest.raises(TimeoutError, match="nothing whole came for 4 s"):
        deadline.left()


def test_bytes_that_drip_do_not_extend_a_deadline() -> None:
    ours, theirs = socket.socketpair()
    clock = Clock()
    with ours, theirs:
        stream = BufferedReader(TimedReader(ours, Deadline(10.0, clock=clock)))
        theirs.sendall(b"1234")
        assert stream.read(4) == b"1234"
        clock.now += 10.0
        theirs.sendall(b"5")
        with pytest.raises(TimeoutError, match="it took longer than 10 s"):
            stream.read(4)


def test_a_read_ends_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = BufferedReader(TimedReader(ours, Deadline(0.02)))
        theirs.sendall(b"1")
        with pytest.raises(TimeoutError, match=r"it took longer than 0\.02 s"):
            stream.read(2)


def test_a_peer_that_takes_nothing_ends_a_send_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        send_all(ours, [bytes(1 << 24)], Deadline(0.05))


def test_all_buffers_are_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_all(ours, [bytes([number % 256]) * (number % 3) for number in range(1500)], Deadline(20.0))
        ours.shutdown(socket.SHUT_WR)
        expected = b"".join(bytes([number % 256]) * (number % 3) for number in range(1500))
        assert theirs.makefile("rb").read() == expected
