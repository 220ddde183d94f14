"""Two movers over loopback: what a fetch brings, when it ends, and what it never does."""

import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from proa_engine.core.types import StoredCheckpoint
from proa_engine.mover.frames import Header, Kind, Refusal
from support.movers import LAYOUT, RunningMover, hashes, make_job, running_mover

MARGIN = 5.0  # seconds, for what ends at once


def repeated(block_hash: bytes, length: int = LAYOUT.page_bytes) -> bytes:
    return (block_hash * (length // len(block_hash) + 1))[:length]


@pytest.mark.parametrize("count", [1, 2, 17])
def test_blocks_come_with_their_content(count: int) -> None:
    chain = hashes(count)
    with running_mover() as source, running_mover() as target:
        source.store(chain, first_page=2)
        target.fetch(make_job(source, chain, first_page=1))
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.error, fetched.is_done) == (count, "", True)
        assert fetched.num_bytes == count * LAYOUT.page_bytes
        for index, block_hash in enumerate(chain):
            assert target.content(1 + index) == repeated(block_hash)


def test_held_blocks_are_not_sent() -> None:
    chain = hashes(6)
    with running_mover() as source, running_mover() as target:
        source.store(chain)
        target.fetch(make_job(source, chain, num_held=4))
        assert target.fetched().num_blocks == 2
        assert target.content(0) == repeated(chain[4])


def test_blocks_that_come_late_are_waited_for() -> None:
    chain = hashes(3)
    with running_mover() as source, running_mover() as target:
        target.fetch(make_job(source, chain, wait_ms=20_000))
        for index, block_hash in enumerate(chain):
            time.sleep(0.02)
            source.store([block_hash], first_page=index)
        assert target.fetched().num_blocks == 3


def test_what_does_not_come_ends_the_fetch_after_the_wait() -> None:
    chain = hashes(3)
    with running_mover() as source, running_mover() as target:
        source.store(chain[:2])
        began = time.monotonic()
        target.fetch(make_job(source, chain, wait_ms=100))
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.error) == (2, "")
        assert 0.1 <= time.monotonic() - began < MARGIN


def test_a_page_is_served_only_when_its_copy_is_complete() -> None:
    chain = hashes(1)
    with running_mover() as source, running_mover() as target:
        source.begin_store(0)
        source.write(0, chain[0])
        target.fetch(make_job(source, chain, wait_ms=50))
        assert target.fetched().num_blocks == 0
        source.end_store([(0, chain[0])])
        target.fetch(make_job(source, chain, job_id=2))
        assert target.fetched().num_blocks == 1


def test_a_page_that_is_stored_again_is_not_settled_as_what_it_was() -> None:
    """The mover may learn of the end of a copy when the next one has begun."""
    old, new = hashes(1), hashes(1, salt=9)
    with running_mover() as source, running_mover() as target:
        source.begin_store(0)
        source.begin_store(0)
        source.write(0, new[0])
        source.serial -= 1
        source.end_store([(0, old[0])])
        target.fetch(make_job(source, old, wait_ms=20))
        assert target.fetched().num_blocks == 0
        source.serial += 1
        source.end_store([(0, new[0])])
        target.fetch(make_job(source, new, job_id=2))
        assert target.fetched().num_blocks == 1


def test_a_page_that_changes_while_it_is_served_is_not_accepted() -> None:
    chain = hashes(3)
    with running_mover() as source, running_mover() as target:
        source.store(chain)
        target.fetch(make_job(source, chain[:1]))
        assert target.fetched().num_blocks == 1  # all three are settled
        source.write(1, b"other content")  # by copies whose serial the server has not seen
        target.fetch(make_job(source, chain, job_id=2))
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.error) == (1, "a block's checksum is wrong")


def test_pages_are_not_written_before_the_copies_that_use_them_are_complete() -> None:
    chain = hashes(2)
    with running_mover() as source, running_mover() as target:
        source.store(chain)
        target.begin_store(10)
        target.write(0, b"read by a load of these copies")
        target.fetch(make_job(source, chain, copied=1, wait_ms=20_000))
        time.sleep(0.05)
        assert target.content(0) == repeated(b"read by a load of these copies")
        target.end_store()
        assert target.fetched().num_blocks == 2


def test_fetched_blocks_are_served_on() -> None:
    chain = hashes(2)
    with running_mover() as first, running_mover() as second, running_mover() as third:
        first.store(chain)
        second.fetch(make_job(first, chain, first_page=3))
        second.fetched()
        third.fetch(make_job(second, chain))
        assert third.fetched().num_blocks == 2
        second.fetch(make_job(third, hashes(1, salt=5), job_id=2, first_page=3, wait_ms=20))  # forgets page 3
        second.fetched()
        third.fetch(make_job(second, chain, job_id=2, first_page=5, wait_ms=20))
        assert third.fetched().num_blocks == 0


def store_checkpoint(source: RunningMover, chain: list[bytes]) -> StoredCheckpoint:
    """A checkpoint behind the whole chain, with tails of two blocks and one, and a state."""
    source.store(chain)
    tails = [[(10, chain[-2]), (11, chain[-1])], [(12, chain[-1])]]
    checkpoint = StoredCheckpoint(chain[-1], tails, state=1)
    source.begin_store(10, 11, 12, LAYOUT.num_pages + 1)
    for unit, content in ((10, b"tail 0"), (11, b"tail 1"), (12, b"other tail"), (LAYOUT.num_pages + 1, b"state")):
        source.write(unit, content)
    source.end_store(checkpoints=[checkpoint])
    return checkpoint


def test_a_checkpoint_comes_with_its_tails_and_its_state() -> None:
    chain = hashes(5)
    with running_mover() as source, running_mover() as target:
        store_checkpoint(source, chain)
        job = make_job(source, chain, tails=[[8, 9], [7]], state=2, needs_checkpoint=True)
        target.fetch(job)
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.checkpoint, fetched.error) == (5, chain[-1], "")
        assert target.content(9) == repeated(b"tail 0")
        assert target.content(8) == repeated(b"tail 1")
        assert target.content(7) == repeated(b"other tail")
        assert target.content(LAYOUT.num_pages + 2) == repeated(b"state", 700) + repeated(b"state", 64)


def test_the_last_checkpoint_below_what_is_there_comes() -> None:
    chain = hashes(5)
    with running_mover() as source, running_mover() as target:
        store_checkpoint(source, chain[:3])
        target.fetch(make_job(source, chain, tails=[[8, 9], [7]], state=2, needs_checkpoint=True, wait_ms=20))
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.checkpoint) == (3, chain[2])


def test_a_checkpoint_that_lost_a_unit_does_not_come() -> None:
    chain = hashes(5)
    for unit in (10, 12, LAYOUT.num_pages + 1):
        with running_mover() as source, running_mover() as target:
            store_checkpoint(source, chain)
            source.begin_store(unit)
            source.end_store()
            target.fetch(make_job(source, chain, tails=[[8, 9], [7]], state=2, needs_checkpoint=True, wait_ms=20))
            fetched = target.fetched()
            assert (fetched.num_blocks, fetched.checkpoint, fetched.error) == (5, b"", "")


def test_a_reset_forgets_what_was_stored_and_what_is_being_stored() -> None:
    chain = hashes(3)
    with running_mover() as source, running_mover() as target:
        source.store(chain[:1])
        source.begin_store(1)
        source.write(1, chain[1])
        source.reset(200.0)
        source.end_store([(1, chain[1])])
        for index in (0, 1):
            target.fetch(make_job(source, chain[index : index + 1], job_id=index, wait_ms=20))
            assert target.fetched().num_blocks == 0
        source.store(chain[:1])
        target.fetch(make_job(source, chain[:1], job_id=3))
        assert target.fetched().num_blocks == 1


@pytest.mark.parametrize(
    ("source_is", "job_is", "refusal"),
    [
        ({"fingerprint": b"other" * 5}, {}, Refusal.FINGERPRINT),
        ({"rank": 1, "num_ranks": 2}, {}, Refusal.RANK),
        ({"since": 100.0}, {"since": 101.0}, Refusal.RESET),
    ],
)
def test_a_source_refuses_by_name(source_is: dict[str, object], job_is: dict[str, object], refusal: Refusal) -> None:
    chain = hashes(2)
    with running_mover(**source_is) as source, running_mover() as target:  # type: ignore[arg-type]
        source.store(chain)
        target.fetch(make_job(source, chain, **job_is))  # type: ignore[arg-type]
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.error) == (0, refusal.sentence)


def test_a_source_with_other_ranks_is_not_asked() -> None:
    with running_mover() as target:
        target.fetch(make_job("127.0.0.1:1", hashes(1), num_ranks=2))
        assert target.fetched().error == "the source has 2 ranks, this engine 1"


def test_a_source_that_does_not_listen_ends_the_fetch_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running_mover() as target:
        target.fetch(make_job(f"127.0.0.1:{port}", hashes(1), wait_ms=20_000))
        assert "refused" in target.fetched().error


def test_a_cancelled_fetch_ends_and_writes_nothing_more() -> None:
    chain = hashes(4)
    with running_mover() as source, running_mover() as target:
        source.store(chain[:2])
        target.fetch(make_job(source, chain, wait_ms=60_000))
        time.sleep(0.05)
        target.cancel(1)
        fetched = target.fetched()
        assert fetched.num_blocks <= 2
        before = target.content(2)
        source.store(chain[2:], first_page=2)
        time.sleep(0.05)
        assert target.content(2) == before


def test_a_source_that_dies_at_any_byte_leaves_whole_blocks() -> None:
    """A recorded answer, cut at each frame's boundary and within the frames."""
    chain, content = hashes(3), bytes(range(250)) * 20
    answer = b""
    with running_mover() as source, running_mover() as target:
        for index, block_hash in enumerate(chain):
            source.write(index, content)
            header = Header(Kind.PAGE, 0, 0, index, block_hash, source.arena.checksum(index), LAYOUT.page_bytes)
            answer += header.encode() + source.content(index)
        frame = len(answer) // 3
        for job_id, cut in enumerate([0, 1, 43, 44, 45, frame - 1, frame, frame + 20, 2 * frame - 1, 3 * frame]):
            with answering(answer[:cut]) as address:
                target.fetch(make_job(address, chain, job_id=job_id))
                fetched = target.fetched()
            assert fetched.num_blocks == cut // frame
            assert "closed the connection" in fetched.error


def test_a_damaged_answer_is_never_accepted() -> None:
    chain = hashes(2)
    rng = random.Random(1)
    with running_mover() as source, running_mover() as target:
        source.write(0, b"content")
        header = Header(Kind.PAGE, 0, 0, 0, chain[0], source.arena.checksum(0), LAYOUT.page_bytes)
        answer = bytearray(header.encode() + source.content(0))
        for job_id in range(40):
            damaged = bytearray(answer)
            place = rng.choice([rng.randrange(44), rng.randrange(len(answer))])
            damaged[place] ^= 1 << rng.randrange(8)
            if place in (6, 7):  # the code, which a page does not have
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
            junk = [b"", b"\xff" * 4, struct.pack("<I", 10) + b"\xc1" * 10, rng.randbytes(200)][index % 4]
            peer.sendall(junk)
        target.fetch(make_job(source, chain))
        assert target.fetched().num_blocks == 3
        for index, peer in enumerate(peers):
            if index % 4 in (1, 2):
                assert peer.recv(1) == b"", "the connection is closed"
            peer.close()


def test_a_mover_imports_neither_torch_nor_grpc() -> None:
    program = "import sys; import proa_engine.mover.process; print([*sys.modules.keys() & {'torch', 'grpc', 'google'}])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a source that answers one request with these bytes and closes the connection."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            (length,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
            connection.recv(length, socket.MSG_WAITALL)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(MARGIN)
