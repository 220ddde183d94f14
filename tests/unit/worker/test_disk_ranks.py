"""What the disks of several ranks have in common."""

from collections.abc import Sequence

from proa_engine.core.kv.mover import DiskChanges, FromMover
from proa_engine.core.kv_events import KvChanges
from proa_engine.core.types import DiskCounts
from proa_engine.executor.disk_ranks import DiskRanks
from proa_engine.executor.movers import RankMovers
from proa_engine.mover.messages import OnDisk

A, B, C = (name.encode() * 16 for name in "abc")


def changes(
    stored: Sequence[bytes] = (), removed: Sequence[bytes] = (), *, is_snapshot: bool = False, num_bytes: int = 0
) -> DiskChanges:
    blocks = KvChanges(is_snapshot=is_snapshot, stored=dict.fromkeys(stored), removed=dict.fromkeys(removed))
    return DiskChanges(blocks=blocks, checkpoints=KvChanges(), counts=DiskCounts(num_bytes=num_bytes))


def test_a_block_is_on_disk_when_all_ranks_have_written_it() -> None:
    ranks, known = DiskRanks(2), set[bytes]()
    for rank, change, expected in (
        (0, changes([A, B], is_snapshot=True), set[bytes]()),
        (1, changes([A], is_snapshot=True), {A}),
        (1, changes([B, C]), {A, B}),
        (0, changes([C], [A]), {B, C}),
        (1, changes([A], is_snapshot=True), set[bytes]()),  # its mover was started again
        (0, changes([A]), {A}),
    ):
        ranks.take(rank, change).blocks.apply(known)
        assert known == expected


def test_counts_are_the_sums_of_the_ranks() -> None:
    ranks = DiskRanks(2)
    ranks.take(0, changes(num_bytes=5))
    ranks.take(1, changes(num_bytes=7))
    assert ranks.take(0, changes(num_bytes=6)).counts.num_bytes == 13


def test_changes_from_before_there_is_a_listener_are_kept() -> None:
    movers, taken = RankMovers(lambda message: None, 1), list[FromMover]()
    before, after = changes([A], is_snapshot=True), changes([B])
    movers.take(OnDisk(0, before))
    movers.listen(taken.append)
    movers.take(OnDisk(0, after))
    assert taken == [before, after]
