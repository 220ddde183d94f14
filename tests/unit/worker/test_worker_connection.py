"""The engine's connection to a worker: why it is lost."""

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from proa_engine.executor.worker_connection import ForeignEndpoint, WorkerConnection, wait_for_worker
from proa_engine.framing import encode
from proa_engine.ranks import wire

DEADLINE = 30.0


class Worker:
    """The worker's side of a connection, and the reason with which the engine loses it."""

    def __init__(self, ours: socket.socket) -> None:
        self.socket = ours
        self.lost: Future[str] = Future()


class Given(ForeignEndpoint):
    """An endpoint whose connection is there."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def open(self) -> socket.socket:
        return self._connection

    def __str__(self) -> str:
        return "here"


@contextmanager
def connected() -> Iterator[tuple[WorkerConnection, Worker]]:
    theirs, ours = socket.socketpair()
    with ours:
        worker = Worker(ours)
        endpoint = Given(theirs)
        stream = wait_for_worker(3, endpoint, print, lambda: None)
        connection = WorkerConnection(3, endpoint, stream, worker.lost.set_result, lambda message: None)
        yield connection, worker
        ours.close()
        connection.close()


def test_the_reason_that_a_worker_gives_is_that_of_its_loss() -> None:
    with connected() as (_, worker):
        worker.socket.sendall(encode(wire.Failed("no memory")))
        worker.socket.close()
        assert worker.lost.result(DEADLINE) == "rank 3 (here) failed: no memory"


@pytest.mark.parametrize("payload", [b"\xc1", b"\x01", encode(wire.Shutdown())[4:]])
def test_a_worker_that_sends_what_is_no_message_is_lost(payload: bytes) -> None:
    with connected() as (_, worker):
        worker.socket.sendall(struct.pack("<I", len(payload)) + payload)
        assert worker.lost.result(DEADLINE).startswith("rank 3 (here) sent what is no message: ")


def test_the_end_of_a_worker_that_was_asked_to_exit_is_no_loss() -> None:
    with connected() as (connection, worker):
        connection.request_exit(has_failed=False)
        worker.socket.close()
        connection.close()
        assert not worker.lost.done()
