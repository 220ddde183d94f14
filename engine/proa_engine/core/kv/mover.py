"""Mover: the interface between the core, which decides what is fetched, and the processes that fetch it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from proa_engine.core.kv_events import KvChanges
from proa_engine.core.types import NO_STATE, DiskCounts, StoredCheckpoint

MAX_CHAIN = 1 << 18  # blocks of a job's chain: a prompt of four million tokens at 16 tokens a block
MAX_WAIT_MS = 60_000  # of a job's `wait_ms`
MAX_JOB_MS = 600_000  # of a job's `max_ms`


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchJob:
    """Pages of host memory to fill from another engine, or from disk.

    `chain[num_held + i]` goes to `pages[i]`. A checkpoint at the end of `chain[:n]` also has, for each table with a
    window, the last blocks before its end: the last one goes to `tails[table][0]`, the one before it to
    `tails[table][1]`, and so on; and a state, which goes to slot `state`. All are reserved until the job has ended on
    every rank.
    """

    job_id: int
    addresses: tuple[str, ...]  # host:port of the source's mover, by rank; empty: the disk
    chain: tuple[bytes, ...]  # hashes of the prompt's leading blocks, at most `MAX_CHAIN`
    num_held: int  # leading blocks of the chain that need not be sent
    pages: tuple[int, ...]  # one for each block behind those
    needs_checkpoint: bool  # a prefix can be used only up to a checkpoint
    tails: tuple[tuple[int, ...], ...] = ()
    state: int = NO_STATE
    copied: int  # serial of the last copies that may use the pages: they are written only when these are complete
    wait_ms: int  # longest time without a whole block; at most `MAX_WAIT_MS`
    max_ms: int  # longest time of the whole job; at most `MAX_JOB_MS`
    since: float  # Unix seconds: a source that may have blocks from before it is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """How far a job is. With several ranks: as far as every rank is."""

    job_id: int
    num_blocks: int  # pages of the job that are filled, in its order
    checkpoint: bytes = b""  # its hash; its tails and state are filled. Empty: none came
    num_bytes: int = 0  # received so far
    is_done: bool = False  # nothing more comes, and nothing is written any more
    error: str = ""  # why it ended early, for the log and the span


class AdoptedUnit(NamedTuple):
    """A page, or a slot of a state, with the content that an earlier engine has left."""

    place: int  # page; slot, if it is a state
    table: int  # -1: a state
    block_hash: bytes
    stored: float  # Unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What an earlier engine has left in a range of pages, verified. With several ranks: on every rank.

    The ranges follow each other from page 0 to the last page. The last one has all states and checkpoints too.
    """

    number: int  # of the range, from 0
    first_page: int
    end_page: int  # behind the last one
    units: tuple[AdoptedUnit, ...] = ()
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    is_done: bool = False  # it is the last range


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskChanges:
    """Which blocks and checkpoints came to the disk and left it. With several ranks: to every rank's disk."""

    blocks: KvChanges  # of table 0
    checkpoints: KvChanges
    counts: DiskCounts


FromMover = Fetched | Adopted | DiskChanges


class Mover(Protocol):
    """Fetches pages, and writes them to disk. Every call returns at once; progress comes to the core's thread as
    `FromMover`.

    A job has one `Fetched` with `is_done`, whatever happens, and none after it. If host memory outlives the engine,
    each range of pages has one `Adopted`, also if nothing was left.
    """

    def listen(self, on_message: Callable[[FromMover], None]) -> None:
        """Pass all messages to `on_message`, from any thread. Called once, before the first job."""
        ...

    def fetch(self, job: FetchJob) -> None: ...

    def cancel(self, job_id: int) -> None:
        """End a job early. Ignored if it has ended."""
        ...

    def write(self, blocks: Sequence[bytes], checkpoint: bytes, copied: int) -> None:
        """Write blocks of table 0 to disk, by their hashes, in the order of a prefix, and the checkpoint at its end;
        empty: none. `copied`: serial of the last copies that were planned."""
        ...

    def reset(self, since: float, copied: int) -> None:
        """Serve nothing that is in host memory now, and delete what is on disk: it is from before `since`, in Unix
        seconds. `copied`: serial of the last copies that were planned."""
        ...
