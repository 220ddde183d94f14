"""The messages of several ranks' movers as one."""

from dataclasses import replace

from proa_engine.core.kv.mover import Adopted, AdoptedUnit, Fetched, FromMover
from proa_engine.core.types import StoredCheckpoint
from proa_engine.executor.movers import RankMovers
from proa_engine.mover.messages import Adopt, AdoptionProgress, FromCore, Progress

UNITS = tuple(AdoptedUnit(place, 0, bytes([place]) * 16, 1.0) for place in range(4))
CHECKPOINT = StoredCheckpoint(bytes(16), [[(3, bytes(16))]], state=1)
RANGE = Adopted(number=0, first_page=0, end_page=4, units=UNITS, checkpoints=(CHECKPOINT,), is_done=True)


def take(*ranges: Adopted) -> list[FromMover]:
    """What the core gets of the messages of as many ranks."""
    received: list[FromMover] = []
    movers = RankMovers(lambda message: None, len(ranges))
    movers.listen(received.append)
    for adopted in ranges[:-1]:
        movers.take(AdoptionProgress(adopted))
        assert not received, "a rank has not answered"
    movers.take(AdoptionProgress(ranges[-1]))
    return received


def test_units_are_adopted_that_every_rank_has_in_the_same_page() -> None:
    moved = UNITS[1]._replace(place=3)
    later = tuple(unit._replace(stored=2.0) for unit in UNITS)
    assert take(RANGE, replace(RANGE, units=(*later[:1], moved, later[2]))) == [
        replace(RANGE, units=(UNITS[0], UNITS[2])),
    ]


def test_checkpoints_are_adopted_that_every_rank_has_in_the_same_units() -> None:
    assert take(RANGE, RANGE) == [RANGE]
    other = CHECKPOINT._replace(state=0)
    assert take(RANGE, replace(RANGE, checkpoints=(other,))) == [replace(RANGE, checkpoints=())]
    assert take(RANGE, replace(RANGE, checkpoints=())) == [replace(RANGE, checkpoints=())]


def test_ranges_of_ranks_are_matched_by_their_numbers() -> None:
    received: list[FromMover] = []
    movers = RankMovers(lambda message: None, 2)
    movers.listen(received.append)
    first, second = replace(RANGE, is_done=False), replace(RANGE, number=1, units=())
    for adopted in (first, second, first, second):
        movers.take(AdoptionProgress(adopted))
    assert received == [first, second]


def test_movers_are_asked_to_adopt_if_memory_outlives_the_engine() -> None:
    for adopts in (False, True):
        sent: list[FromCore] = []
        RankMovers(sent.append, 1, adopts=adopts).listen(lambda message: None)
        assert sent == [Adopt()] * adopts


def test_a_job_is_as_far_as_it_is_on_every_rank() -> None:
    received: list[FromMover] = []
    movers = RankMovers(lambda message: None, 2)
    movers.listen(received.append)
    ends = [
        Fetched(job_id=7, num_blocks=5, checkpoint=b"one", num_bytes=50, is_done=True),
        Fetched(job_id=7, num_blocks=3, checkpoint=b"other", num_bytes=30, is_done=True, error="broken"),
    ]
    for fetched in ends:
        movers.take(Progress(fetched))
    assert received == [Fetched(job_id=7, num_blocks=3, num_bytes=80, is_done=True, error="broken")]
