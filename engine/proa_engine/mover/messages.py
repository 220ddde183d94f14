"""Messages between a worker and its mover: length-prefixed msgpack over a pair of Unix sockets.

The worker sends Init once, then Copied and the core's requests. The mover answers Init with Listening, sends what the
core gets, and Alive once a second. It exits when its socket ends.
"""

import msgspec

from proa_engine.config import PeerTls
from proa_engine.core.kv.mover import Adopted, DiskChanges, Fetched, FetchJob
from proa_engine.core.types import StoredCheckpoint
from proa_engine.mover.layout import ArenaLayout


class DiskSettings(msgspec.Struct, frozen=True):
    """A rank's part of the disk."""

    folder: str
    num_bytes: int
    bytes_per_second: float  # written
    adopts: bool = True  # what is in the folder may be used: the cache was not reset since the start


class Init(msgspec.Struct, tag=True, frozen=True):
    """Map the arena and listen on `port`; 0: on any free one; None: do not listen."""

    layout: ArenaLayout
    host: str
    port: int | None
    rank: int
    num_ranks: int
    fingerprint: bytes
    since: float  # Unix seconds: what is stored is not older
    copied: int = 0  # serial of the last copies that are complete
    epoch: int = 0  # of the arena's directory, if it has one
    tls: PeerTls | None = None  # None: plaintext
    disk: DiskSettings | None = None
    sources: tuple[str, ...] = ()  # names, addresses and networks of engines from which blocks may be fetched


class Copied(msgspec.Struct, tag=True, frozen=True):
    """All copies up to this serial are complete. What they stored may be served from now on."""

    serial: int
    blocks: tuple[tuple[int, bytes], ...] = ()  # page and hash of blocks of table 0
    checkpoints: tuple[StoredCheckpoint, ...] = ()


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """Start a job."""

    job: FetchJob


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """End a job early; it is still answered by Progress with `is_done`."""

    job_id: int


class Reset(msgspec.Struct, tag=True, frozen=True):
    """Serve nothing that copies up to `copied` have stored, and delete what is on disk."""

    since: float
    copied: int


class Adopt(msgspec.Struct, tag=True, frozen=True):
    """Verify what an earlier engine has left in the arena; each range of pages is answered by `AdoptionProgress`.

    Sent once."""


class WriteBlocks(msgspec.Struct, tag=True, frozen=True):
    """Write blocks of table 0 to disk, by their hashes, in order, and the checkpoint behind them, if there is one.

    Copies up to `copied` have stored them.
    """

    blocks: tuple[bytes, ...]
    checkpoint: bytes = b""
    copied: int = 0


class Listening(msgspec.Struct, tag=True, frozen=True):
    """The answer to Init. `port` None: the mover serves no other engines."""

    port: int | None


class Progress(msgspec.Struct, tag=True, frozen=True):
    """How far this rank's part of a job is."""

    fetched: Fetched


class AdoptionProgress(msgspec.Struct, tag=True, frozen=True):
    """What is left of an earlier engine in a range of this rank's pages."""

    adopted: Adopted


class OnDisk(msgspec.Struct, tag=True, frozen=True):
    """How what this rank has on disk has changed. The first one of a mover has everything."""

    rank: int
    changes: DiskChanges


class Log(msgspec.Struct, tag=True, frozen=True):
    """A line for the log."""

    line: str


class Alive(msgspec.Struct, tag=True, frozen=True):
    """The mover works. Its worker kills a silent one."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The mover cannot start, for example because the port is in use, and exits."""

    reason: str


FromCore = Fetch | Cancel | Reset | Adopt | WriteBlocks  # to the movers of all ranks
ToCore = Progress | AdoptionProgress | OnDisk
ToMover = Init | Copied | FromCore
ToWorker = Listening | ToCore | Log | Alive | Refused
