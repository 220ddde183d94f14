"""Two movers over loopback: what a fetch brings, and when it ends."""

import subprocess
import sys
import time

import pytest

from proa_engine.mover.frames import Refusal
from support.movers import LAYOUT, hashes, make_job, repeated, running_mover

MARGIN = 5.0  # seconds, for what ends at once


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


def test_several_engines_fetch_the_same_blocks_at_once() -> None:
    chain = hashes(17)
    with running_mover() as source, running_mover() as second, running_mover() as third:
        for target in (second, third):
            target.fetch(make_job(source, chain[:9], wait_ms=20_000))
            target.fetch(make_job(source, chain[:9], job_id=2, first_page=9, wait_ms=20_000))
        for index, block_hash in enumerate(chain):
            source.store([block_hash], first_page=index)
        for target in (second, third):
            assert {target.fetched().num_blocks for _ in range(2)} == {9}
            assert target.content(8) == target.content(17) == repeated(chain[8])


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


def test_a_checkpoint_comes_with_its_tails_and_its_state() -> None:
    chain = hashes(5)
    with running_mover() as source, running_mover() as target:
        source.store_checkpoint(chain)
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
        source.store_checkpoint(chain[:3])
        target.fetch(make_job(source, chain, tails=[[8, 9], [7]], state=2, needs_checkpoint=True, wait_ms=20))
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.checkpoint) == (3, chain[2])


def test_a_checkpoint_that_lost_a_unit_does_not_come() -> None:
    chain = hashes(5)
    for unit in (10, 12, LAYOUT.num_pages + 1):
        with running_mover() as source, running_mover() as target:
            source.store_checkpoint(chain)
            source.begin_store(unit)
            source.end_store()
            target.fetch(make_job(source, chain, tails=[[8, 9], [7]], state=2, needs_checkpoint=True, wait_ms=20))
            fetched = target.fetched()
            assert (fetched.num_blocks, fetched.checkpoint, fetched.error) == (5, b"", "")


def test_a_reset_during_a_fetch_forgets_what_it_brings() -> None:
    """The target does not serve it; the core does not use it either."""
    chain = hashes(2)
    with running_mover() as source, running_mover() as target, running_mover() as third:
        source.store(chain[:1])
        target.fetch(make_job(source, chain, wait_ms=20_000))
        time.sleep(0.05)
        target.reset(200.0)
        time.sleep(0.05)
        source.store(chain[1:], first_page=1)
        assert target.fetched().num_blocks == 2
        third.fetch(make_job(target, chain, wait_ms=20))
        assert third.fetched().num_blocks == 0


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


def test_a_mover_imports_neither_torch_nor_grpc() -> None:
    program = "import sys; import proa_engine.mover.process; print([*sys.modules.keys() & {'torch', 'grpc', 'google'}])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
