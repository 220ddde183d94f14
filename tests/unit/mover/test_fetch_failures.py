"""Fetches whose source or target dies, or sends what it must not: whole blocks are kept, and nothing else."""

import errno
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

import pytest

from proa_engine.mover import server
from proa_engine.mover.arena import Arena
from proa_engine.mover.frames import FINGERPRINT_BYTES, Header, Kind, Refusal
from proa_engine.mover.index import Index
from proa_engine.mover.messages import Init
from proa_engine.mover.server import Server
from proa_engine.tls import Plaintext
from support.movers import FINGERPRINT, LAYOUT, blocks_request, hashes, make_job, running_mover

MARGIN = 5.0  # seconds, for what ends at once
HEADER_BYTES = len(Header(Kind.END).encode())
REQUEST_BYTES = len(blocks_request([]))
FINGERPRINT_FRAME = Header(Kind.FINGERPRINT, length=FINGERPRINT_BYTES).encode() + FINGERPRINT


def test_a_source_that_does_not_listen_ends_the_fetch_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running_mover() as target:
        target.fetch(make_job(f"127.0.0.1:{port}", hashes(1), wait_ms=20_000))
        assert target.fetched().error == "there is no connection to the source"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:99999999999", "a..b:1"])
def test_an_address_that_cannot_be_used_ends_the_fetch(address: str) -> None:
    with running_mover() as target:
        target.fetch(make_job(address, hashes(1), wait_ms=20_000))
        assert target.fetched().error == "there is no connection to the source"


def test_a_source_that_dies_at_any_byte_leaves_whole_blocks() -> None:
    """An answer of blocks, cut at each frame's boundary and within the frames."""
    chain, content = hashes(3), bytes(range(250)) * 20
    answer = FINGERPRINT_FRAME
    with running_mover() as source, running_mover() as target:
        for index, block_hash in enumerate(chain):
            source.write(index, content)
            header = Header(Kind.PAGE, 0, 0, index, block_hash, source.arena.checksum(index), LAYOUT.page_bytes)
            answer += header.encode() + source.content(index)
        begin = len(FINGERPRINT_FRAME)
        frame = (len(answer) - begin) // 3
        cuts = [0, 1, begin - 1, *(begin + cut for cut in (0, 1, 43, 44, 45, frame - 1, frame, frame + 20))]
        for job_id, cut in enumerate([*cuts, begin + 2 * frame - 1, begin + 3 * frame]):
            with answering(answer[:cut]) as address:
                target.fetch(make_job(address, chain, job_id=job_id))
                fetched = target.fetched()
            assert fetched.num_blocks == max(cut - begin, 0) // frame
            assert "closed the connection" in fetched.error


def test_a_source_that_dies_within_a_checkpoint_leaves_the_blocks_before_it() -> None:
    """An answer with tails and a state, recorded and cut at each frame's boundary and within the frames."""
    chain = hashes(3)
    with running_mover() as source, running_mover() as target:
        source.store_checkpoint(chain)
        answer = record(source.port, blocks_request(chain, needs_checkpoint=True))
        page, state = HEADER_BYTES + LAYOUT.page_bytes, HEADER_BYTES + sum(LAYOUT.state_bytes)
        begin = len(FINGERPRINT_FRAME)
        ends = [begin + number * page for number in range(7)]
        ends += [ends[-1] + state, ends[-1] + state + HEADER_BYTES]
        assert len(answer) == ends[-1] + HEADER_BYTES, "blocks, tails, state, checkpoint and end"
        cuts = sorted({cut for end in ends for cut in (end - 1, end, end + 1, end + 30)} - {-1})
        for job_id, cut in enumerate(cuts):
            job = make_job("", chain, job_id=job_id, tails=[[8, 9], [7]], state=2, needs_checkpoint=True)
            with answering(answer[:cut]) as address:
                target.fetch(replace(job, addresses=(address,)))
                fetched = target.fetched()
            assert fetched.num_blocks == min(max(cut - begin, 0) // page, 3), cut
            assert (fetched.checkpoint == chain[-1]) is (cut >= ends[-1]), cut
            assert "closed the connection" in fetched.error


def test_a_source_that_cannot_start_a_thread_refuses_and_serves_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Thread:
        raise RuntimeError("can't start new thread")

    chain = hashes(1)
    with running_mover() as source, running_mover() as target:
        source.store(chain)
        with monkeypatch.context() as patches:
            patches.setattr(server, "Thread", fail)
            target.fetch(make_job(source, chain, wait_ms=20_000))
            assert target.fetched().num_blocks == 0
        target.fetch(make_job(source, chain, job_id=2, wait_ms=20_000))
        assert target.fetched().num_blocks == 1


class FailingListener(socket.socket):
    """Accepts nothing at its first call, as without a free file descriptor; then one connection; then it is closed."""

    has_failed = False

    def accept(self) -> tuple[socket.socket, object]:
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EMFILE, "no file descriptor is free")
        with self:
            return super().accept()


def test_a_source_that_cannot_accept_a_connection_accepts_the_next() -> None:
    descriptor = os.memfd_create("proa-test-arena")
    os.ftruncate(descriptor, LAYOUT.num_bytes)
    arena = Arena(descriptor, LAYOUT)
    os.close(descriptor)
    init = Init(layout=LAYOUT, host="", port=0, rank=0, num_ranks=1, fingerprint=FINGERPRINT, since=0.0)
    listener = FailingListener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    with socket.create_connection(listener.getsockname(), timeout=MARGIN) as target:
        Server(listener, arena, Index(arena, 0.0), init, Plaintext()).serve_forever()
        target.sendall(blocks_request(hashes(1), wait_ms=0))
        expected = FINGERPRINT_FRAME + Header(Kind.END).encode()
        with target.makefile("rb") as answer:
            assert answer.read(len(expected)) == expected


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 3000])
def test_targets_that_die_take_no_place_at_the_source(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they ask, within their request, and within its answer."""
    monkeypatch.setattr("proa_engine.mover.server.MAX_CONNECTIONS", 4)
    chain = hashes(19)
    asked = blocks_request([*chain, *hashes(150, salt=1)], wait_ms=60_000)
    with running_mover() as source, running_mover() as target:
        source.store(chain)
        for _ in range(8):
            with socket.create_connection(("127.0.0.1", source.port)) as peer:
                peer.sendall(asked[:num_bytes])
        deadline, job_id = time.monotonic() + MARGIN, 1
        while True:  # the source notices soon
            target.fetch(make_job(source, chain, job_id=job_id))
            if (fetched := target.fetched()).num_blocks == len(chain):
                break
            assert time.monotonic() < deadline, fetched.error
            job_id += 1
            time.sleep(0.05)


def test_a_damaged_answer_is_never_accepted() -> None:
    chain = hashes(2)
    rng = random.Random(1)
    with running_mover() as source, running_mover() as target:
        source.write(0, b"content")
        header = Header(Kind.PAGE, 0, 0, 0, chain[0], source.arena.checksum(0), LAYOUT.page_bytes)
        answer = bytearray(FINGERPRINT_FRAME + header.encode() + source.content(0))
        for job_id in range(60):
            damaged, begin = bytearray(answer), len(FINGERPRINT_FRAME)
            place = rng.choice([rng.randrange(begin + 44), rng.randrange(len(answer))])
            damaged[place] ^= 1 << rng.randrange(8)
            # Fields that a frame of this kind does not have: of the first one, all but magic, kind and length.
            if 5 <= place < 36 or place - begin in (6, 7):
                continue
            with answering(bytes(damaged)) as address:
                target.fetch(make_job(address, chain, job_id=job_id))
                assert target.fetched().num_blocks == 0, f"byte {place}"


def test_hostile_bytes_do_not_disturb_others() -> None:
    chain, rng = hashes(3), random.Random(2)
    with running_mover() as source, running_mover() as target:
        source.store(chain)
        peers = [socket.create_connection(("127.0.0.1", source.port), timeout=MARGIN) for _ in range(20)]
        for index, peer in enumerate(peers):
            invalid = blocks_request(chain, num_held=4)  # of three
            junk = [b"", b"\xff" * REQUEST_BYTES, invalid, rng.randbytes(200)][index % 4]
            peer.sendall(junk)
        target.fetch(make_job(source, chain))
        assert target.fetched().num_blocks == 3
        for index, peer in enumerate(peers):
            answered = b"".join(iter(lambda peer=peer: peer.recv(100), b"")) if index % 4 else b""  # type: ignore[misc]
            refused = Header(Kind.REFUSED, code=Refusal.VERSION).encode()
            assert answered == (refused if index % 4 in (1, 3) else b"")
            peer.close()


def record(port: int, asked: bytes) -> bytes:
    """Return all that the mover at this port answers to one request."""
    with socket.create_connection(("127.0.0.1", port), timeout=MARGIN) as connection:
        connection.sendall(asked)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a source that answers one request with these bytes and closes the connection."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(REQUEST_BYTES, socket.MSG_WAITALL)
            connection.recv(1 << 16)  # the chain
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(MARGIN)
