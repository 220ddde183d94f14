"""Sources that are too slow, and sources that send more than they were asked for: a fetch ends in its time."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from threading import Event, Thread

import pytest

from proa_engine.mover.frames import FINGERPRINT_BYTES, Header, Kind, Refusal
from support.movers import FINGERPRINT, LAYOUT, hashes, make_job, running_mover

FINGERPRINT_FRAME = Header(Kind.FINGERPRINT, length=FINGERPRINT_BYTES).encode() + FINGERPRINT
CHAIN = hashes(20)
TOO_MANY = 100_000  # parts, which end an answer that the target takes for ever


@contextmanager
def answering(parts: Callable[[], Iterator[bytes]], seconds: float = 0.0) -> Iterator[str]:
    """The address of a source that sends parts of an answer, each after `seconds`, until the target has enough."""
    ended = Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(FINGERPRINT_FRAME)
            for number, part in enumerate(parts()):
                if number >= TOO_MANY or ended.wait(seconds):
                    return
                connection.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        thread.join(20)


@pytest.fixture(autouse=True)
def without_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proa_engine.mover.client._GRACE_SECONDS", 0.0)


def page(column: int, content: bytes, checksum: int) -> bytes:
    return Header(Kind.PAGE, 0, 0, column, CHAIN[column], checksum, LAYOUT.page_bytes).encode() + content


@pytest.mark.parametrize("num_sent", [0, 3])
def test_a_source_that_drips_bytes_ends_the_fetch_after_the_wait_for_a_block(num_sent: int) -> None:
    """A byte comes long before each wait is over: it is the wait for a whole block."""
    with running_mover() as target:
        target.write(19, b"content")
        content, checksum = target.content(19), target.arena.checksum(19)

        def drip() -> Iterator[bytes]:
            for column in range(num_sent):
                yield page(column, content, checksum)
            for byte in page(num_sent, content, checksum):
                yield bytes([byte])

        with answering(drip, 0.01) as address:  # a block takes 50 s
            target.fetch(make_job(address, CHAIN[:4], wait_ms=1000))
            fetched = target.fetched()
        assert fetched.num_blocks == num_sent
        assert fetched.error == "the source is too slow: nothing whole came for 1 s"


def test_a_source_that_sends_blocks_slowly_ends_the_fetch_after_its_whole_time() -> None:
    """Each block comes in time; all of them would take too long."""
    with running_mover() as target:
        target.write(19, b"content")
        content, checksum = target.content(19), target.arena.checksum(19)
        with answering(lambda: (page(column, content, checksum) for column in range(20)), 0.1) as address:
            target.fetch(make_job(address, CHAIN, wait_ms=20_000, max_ms=500))
            fetched = target.fetched()
        assert fetched.error == "the source is too slow: it took longer than 0.5 s"
        assert fetched.num_blocks < 20


@pytest.mark.parametrize("kind", [Kind.PAGE, Kind.STATE, Kind.CHECKPOINT])
def test_a_source_that_repeats_a_frame_for_ever_ends_the_fetch(kind: Kind) -> None:
    """Frames that come fast, and of which the job has a place for one."""
    with running_mover() as target:
        unit = LAYOUT.num_pages if kind == Kind.STATE else 19
        target.write(unit, b"content")
        length = 0 if kind == Kind.CHECKPOINT else len(target.content(unit))
        checksum = target.arena.checksum(unit)
        frame = Header(kind, int(kind == Kind.PAGE), 0, 0, CHAIN[0], checksum, length).encode()
        frame += target.content(unit)[:length]
        with answering(lambda: cycle([frame])) as address:
            job = make_job(address, CHAIN[:1], tails=[[1], [2]], state=0, needs_checkpoint=True)
            target.fetch(job)
            error = target.fetched().error
        assert any(part in error for part in ("than were asked for", "of kind", "was not asked for"))


@pytest.mark.parametrize(
    "first",
    [
        b"",
        Header(Kind.FINGERPRINT, length=FINGERPRINT_BYTES).encode() + bytes(FINGERPRINT_BYTES),
        Header(Kind.FINGERPRINT, length=FINGERPRINT_BYTES - 1).encode() + FINGERPRINT[:-1],
    ],
)
def test_pages_of_a_source_with_another_model_are_not_kept(first: bytes) -> None:
    """The target does not rely on the source's refusal: a source that does not say, or says otherwise, is ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener, running_mover() as target:
        target.write(19, b"content")
        content, checksum = target.content(19), target.arena.checksum(19)
        target.fetch(make_job(f"127.0.0.1:{listener.getsockname()[1]}", CHAIN[:1]))
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            with suppress(OSError):
                connection.sendall(first + page(0, content, checksum) + Header(Kind.END).encode())
            fetched = target.fetched()
        assert fetched.num_blocks == 0
        assert fetched.error in (Refusal.FINGERPRINT.sentence, "the source does not say which model it has")
