"""The first message of a mover to its worker, which starts no mover that says anything else."""

import threading

import pytest

from proa_engine.mover.messages import Listening, ToWorker
from proa_engine.mover.process import Mover
from support.movers import running_mover


def num_threads() -> int:
    """Threads that show a mover's life."""
    return sum(thread.name == "proa-mover-alive" for thread in threading.enumerate())


def test_a_mover_shows_no_life_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    send, before, at_listening = Mover._send, num_threads(), list[int]()

    def counting(self: Mover, message: ToWorker) -> None:
        if isinstance(message, Listening):
            at_listening.append(num_threads())
        send(self, message)

    monkeypatch.setattr(Mover, "_send", counting)
    with running_mover():
        assert at_listening == [before]
