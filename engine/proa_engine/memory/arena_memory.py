"""The memory of a rank's arena: anonymous, or a file in memory that outlives the engine and is adopted by the next one.

Neither is from torch's allocator of pinned memory, which rounds sizes up to powers of two.
"""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from proa_engine.mover.directory import Directory
from proa_engine.mover.layout import SERIAL_BYTES, ArenaLayout

_LOCK_SECONDS = 10.0  # for which the mover of an engine that was killed may still run


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """An open file descriptor of the memory. `since`: nothing in it was stored before, in Unix seconds. `epoch`: of its
    directory, if it has one."""

    descriptor: int
    layout: ArenaLayout
    since: float
    epoch: int = 0
    is_adopted: bool = False  # it may have blocks of an earlier engine

    def close(self) -> None:
        """Let another engine open the file, which this process must not write any more. Memory that is mapped stays."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # `mmap` has duplicates of the descriptor
        os.close(self.descriptor)


def anonymous_memory(layout: ArenaLayout) -> ArenaMemory:
    """Return new memory. Pages that were never written take none."""
    descriptor = os.memfd_create("proa-kv")
    os.ftruncate(descriptor, layout.num_bytes)
    return ArenaMemory(descriptor, layout, time.time())


def open_file(
    folder: Path, rank: int, layout: ArenaLayout, fingerprint: bytes, *, lock_seconds: float = _LOCK_SECONDS
) -> ArenaMemory:
    """Return the memory of the rank's file in `folder`: that of an earlier engine with the same fingerprint and layout,
    otherwise emptied. Other engines cannot open it until this one and its mover have ended.

    Raises `ValueError`, with a sentence for the user, if it is in use or has no room.
    """
    path = folder / f"rank-{rank}.arena"
    descriptor = _open(path)
    try:
        _lock(descriptor, path, lock_seconds)
        return _adopt(descriptor, layout, fingerprint, rank) or _empty(descriptor, path, layout, fingerprint, rank)
    except BaseException:
        os.close(descriptor)
        raise


def existing_bytes(folder: Path) -> int:
    """Return how much memory the files of an earlier engine take, all ranks together."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("rank-*.arena"))


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"kv_offloading_path: cannot open {path}: {error.strerror}") from None
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise ValueError(f"kv_offloading_path: {path} belongs to another user: choose a folder of the engine's own")
    return descriptor


def _lock(descriptor: int, path: Path, seconds: float) -> None:
    """Lock the file for as long as any process has the descriptor. Raises `ValueError`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"kv_offloading_path: {path} is in use by another engine: give each engine a folder of its own"
                ) from None
        time.sleep(0.1)


def _adopt(descriptor: int, layout: ArenaLayout, fingerprint: bytes, rank: int) -> ArenaMemory | None:
    """Return the memory that an earlier engine has left; None if it differs from this one, or there was none."""
    if os.fstat(descriptor).st_size != layout.num_bytes:
        return None
    header = Directory(descriptor, layout).read_header(fingerprint, rank)
    if header is None:
        return None
    # This engine counts its copies from 1, so that each of them changes the serial of what it writes.
    os.pwrite(descriptor, bytes(layout.num_units * SERIAL_BYTES), 0)
    return ArenaMemory(descriptor, layout, *header, is_adopted=True)


def _empty(descriptor: int, path: Path, layout: ArenaLayout, fingerprint: bytes, rank: int) -> ArenaMemory:
    """Begin anew. All memory is allocated now: where there is none, a later write would kill the process."""
    os.ftruncate(descriptor, 0)
    try:
        os.posix_fallocate(descriptor, 0, layout.num_bytes)
    except OSError as error:
        os.ftruncate(descriptor, 0)
        raise ValueError(
            f"kv_offloading_path: {path.parent} has no room for {layout.num_bytes / 2**30:.2f} GiB ({error.strerror}): "
            "lower kv_offloading_size, or make the folder larger"
        ) from None
    since = time.time()
    epoch = Directory(descriptor, layout).initialize(fingerprint, rank, since)
    return ArenaMemory(descriptor, layout, since, epoch)
