"""What connections to a mover's port can take from it: little, all of them together, and none of others' time."""

import random
import resource
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from proa_engine.core.kv.mover import MAX_CHAIN, MAX_JOB_MS, MAX_WAIT_MS
from proa_engine.mover import server
from proa_engine.mover.frames import FINGERPRINT_BYTES, Header, Kind, Refusal
from support.movers import FINGERPRINT, RunningMover, blocks_request, hashes, make_job, running_mover

SECONDS = 20.0  # for what happens at once
CHAIN = hashes(3)
FINGERPRINT_FRAME = Header(Kind.FINGERPRINT, length=FINGERPRINT_BYTES).encode() + FINGERPRINT
REQUEST_BYTES = len(blocks_request([]))


def connect(mover: RunningMover) -> socket.socket:
    return socket.create_connection(("127.0.0.1", mover.port), timeout=SECONDS)


def answer(connection: socket.socket) -> bytes:
    """All that comes until the mover ends the connection."""
    with suppress(ConnectionResetError):
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return b""


def read(connection: socket.socket, length: int) -> bytes:
    """That many bytes, fewer if the connection ends."""
    with connection.makefile("rb") as stream:
        return stream.read(length)


def refused(refusal: Refusal) -> bytes:
    return Header(Kind.REFUSED, code=refusal).encode()


@contextmanager
def serving() -> Iterator[tuple[RunningMover, RunningMover]]:
    """A mover with blocks, and one that can fetch them."""
    with running_mover() as source, running_mover() as target:
        source.store(CHAIN)
        yield source, target


def assert_serves(source: RunningMover, target: RunningMover, job_id: int = 1) -> None:
    target.fetch(make_job(source, CHAIN, job_id=job_id))
    fetched = target.fetched()
    assert (fetched.num_blocks, fetched.error) == (len(CHAIN), "")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": MAX_CHAIN + 1},
        {"num_blocks": 2**32 - 1},
        {"num_held": 4},
        {"num_held": 2**32 - 5},  # -5 as a signed number
        {"wait_ms": MAX_WAIT_MS + 1},
        {"wait_ms": 2**32 - 1},
        {"max_ms": MAX_JOB_MS + 1},
        {"since": float("nan")},
        {"since": float("inf")},
    ],
)
def test_a_request_with_values_out_of_range_ends_the_connection(changes: dict[str, Any]) -> None:
    with serving() as (source, target), connect(source) as peer:
        peer.sendall(blocks_request(CHAIN, **changes))
        assert answer(peer) == b""
        assert_serves(source, target)


@pytest.mark.parametrize("request_bytes", [struct.pack("<I", 1 << 24) + bytes(100), b"GET / HTTP/1.1\r\n" * 10])
def test_what_is_no_request_is_refused_by_version(request_bytes: bytes) -> None:
    with running_mover() as source, connect(source) as peer:
        peer.sendall(request_bytes)
        assert answer(peer) == refused(Refusal.VERSION)


def test_a_request_with_another_fingerprint_is_refused_before_its_chain_is_read() -> None:
    """The chain never comes, so nobody waits for it."""
    with running_mover() as source, connect(source) as peer:
        peer.sendall(blocks_request([], num_blocks=MAX_CHAIN, fingerprint=bytes(32)))
        peer.shutdown(socket.SHUT_WR)
        assert answer(peer) == refused(Refusal.FINGERPRINT)


def test_a_refusal_arrives_though_the_chain_was_sent() -> None:
    """Closing a connection with unread bytes resets it."""
    with running_mover() as source, connect(source) as peer:
        peer.sendall(blocks_request(hashes(1) * 10_000, fingerprint=bytes(32)))
        assert read(peer, len(refused(Refusal.FINGERPRINT))) == refused(Refusal.FINGERPRINT)


def test_chains_of_all_connections_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CHAIN_BYTES", 10 * 16)
    monkeypatch.setattr(server, "SHORT_CHAIN_BYTES", 3 * 16)
    with ExitStack() as stack, running_mover() as source:
        source.store(CHAIN)
        peers = [stack.enter_context(connect(source)) for _ in range(2)]
        for peer in peers:
            peer.sendall(blocks_request(hashes(5, salt=1)))  # waits for blocks that never come
            assert read(peer, len(FINGERPRINT_FRAME)) == FINGERPRINT_FRAME
        with connect(source) as third:
            third.sendall(blocks_request(hashes(4)))
            assert answer(third) == refused(Refusal.BUSY)
        with running_mover() as target:
            assert_serves(source, target)  # a short chain
            peers[0].close()
            wait_until_served(source, target, [*CHAIN, *hashes(1, salt=2)])


def wait_until_served(source: RunningMover, target: RunningMover, chain: Sequence[bytes] = CHAIN) -> None:
    """The mover notices a closed connection within half a second."""
    began, job_id = time.monotonic(), 1
    while time.monotonic() - began < SECONDS:
        job_id += 1
        target.fetch(make_job(source, chain, job_id=job_id, wait_ms=0))
        if (fetched := target.fetched()).num_blocks == len(CHAIN):
            return
        assert fetched.error == Refusal.BUSY.sentence
        time.sleep(0.01)
    raise AssertionError("the place was not released")


def test_connections_without_a_request_give_way_to_new_ones() -> None:
    with ExitStack() as stack, serving() as (source, target):
        silent = [stack.enter_context(connect(source)) for _ in range(2 * server.MAX_SILENT)]
        for peer in silent[::2]:
            peer.sendall(blocks_request(CHAIN)[: REQUEST_BYTES - 1])
        assert_serves(source, target)
        for peer in silent[: server.MAX_SILENT]:
            assert answer(peer) == b"", "the oldest are ended"


def test_requests_that_do_not_come_end_the_connection_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte comes long before any read would time out."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    with running_mover() as source, connect(source) as peer:
        peer.settimeout(0.02)
        for byte in blocks_request(hashes(1) * 1000):
            try:
                peer.sendall(bytes([byte]))
                if peer.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
        raise AssertionError("the mover waited for the whole request")


def test_a_target_that_takes_nothing_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_END_SECONDS", 0.1)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    with serving() as (source, target), connect(source) as peer:
        # Each block again and again: more than the buffers of both sockets hold.
        peer.sendall(blocks_request(CHAIN * 10_000, max_ms=300))
        assert read(peer, len(FINGERPRINT_FRAME)) == FINGERPRINT_FRAME
        wait_until_served(source, target)


def test_random_bytes_and_damaged_requests_do_not_disturb_others() -> None:
    rng = random.Random(7)
    whole = blocks_request(CHAIN, wait_ms=0)
    with serving() as (source, target):
        for _ in range(300):
            sent = bytearray(whole if rng.random() < 0.8 else rng.randbytes(rng.randrange(200)))
            for _ in range(rng.randrange(4)):
                if sent:
                    place = rng.choice([rng.randrange(len(sent)), rng.randrange(min(len(sent), REQUEST_BYTES))])
                    sent[place] = rng.randrange(256)
            with connect(source) as peer:
                peer.sendall(sent[: rng.choice([len(sent), rng.randrange(len(sent) + 1)])])
                if rng.random() < 0.5:
                    peer.shutdown(socket.SHUT_WR)
                    received = answer(peer)
                    assert received[:4] in (b"", b"PKV1")
        assert_serves(source, target)


def test_hostile_connections_take_little_memory() -> None:
    """Requests for the longest chains, with the fingerprint, which is public, and without."""
    rng = random.Random(8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    header = blocks_request([], num_blocks=MAX_CHAIN)
    half = rng.randbytes(MAX_CHAIN * 8)
    with ExitStack() as stack, serving() as (source, target):
        peers = [stack.enter_context(connect(source)) for _ in range(64)]
        for index, peer in enumerate(peers):
            with suppress(OSError):
                peer.sendall(header if index % 2 else blocks_request([], num_blocks=MAX_CHAIN, fingerprint=half[:32]))
                peer.sendall(half)
        assert_serves(source, target)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < 3 * server.MAX_CHAIN_BYTES
