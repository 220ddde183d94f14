"""Downloads of objects into a folder: several ranges at once, resumed after a kill, checked before a file has its
name.

A file that is not complete is NAME.part, as long as the object, beside NAME.part.done: a line with the object's size
and version, then the number of each range that is on the disk. Both survive a crash of the machine, because a range is
written to the disk before its number. With the record of another version the file is begun anew.

Checked for each file: its size, and that each range came from the version that was listed; then its MD5, where the
store's ETag is one, which is so for an object that was uploaded in one piece, or in pieces of a size that the usual
programs take. TLS protects the bytes on their way. The stores' other checksums (CRC64NVME, CRC32C) are not compared,
because obstore does not show them.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

from proa_engine.sources import daemon_threads
from proa_engine.sources.object_store import ObjectFile, ObjectFolder, ObjectStoreError

RANGE_BYTES = 16 << 20
NUM_THREADS = 16
_PART, _DONE = ".part", ".part.done"
_MD5 = re.compile(r"[0-9a-f]{32}")
_MD5_OF_PARTS = re.compile(r"([0-9a-f]{32})-(\d+)")
_MIB = 1 << 20
# aws and boto3 take 8 MiB, doubled until 10,000 parts suffice; rclone and obstore 5; mc 16; s3fs and s5cmd 50.
_PART_SIZES = tuple(size * _MIB for size in (5, 8, 10, 15, 16, 25, 32, 50, 64, 100, 128, 256, 512))
_READ_BYTES = 4 * _MIB


class DownloadStopped(Exception):
    """Another range failed."""


def bytes_left(folder: Path, files: Sequence[ObjectFile]) -> int:
    """The bytes of `files` that are not in `folder`, neither complete nor in part."""
    return sum(_Partial.read(folder, file).bytes_left for file in files if not (folder / file.name).is_file())


def bytes_not_begun(folder: Path, files: Sequence[ObjectFile]) -> int:
    """The sizes of the `files` of which nothing is in `folder`, not even a .part."""
    return sum(each.size for each in files if not any((folder / (each.name + end)).exists() for end in ("", _PART)))


def allocate(folder: Path, files: Sequence[ObjectFile]) -> None:
    """Give each file that is not complete a .part of its full size, without blocks on the disk."""
    for file in files:
        if not (folder / file.name).is_file():
            partial = _Partial.read(folder, file)
            if not partial.done:
                partial.begin()


def download(
    source: ObjectFolder,
    files: Sequence[ObjectFile],
    folder: Path,
    add_bytes: Callable[[int], None],
    *,
    etags_are_md5s: bool,
) -> tuple[str, ...]:
    """Download what is not in `folder`, and return the names of the files whose MD5 is the store's.

    `add_bytes` is called by several threads. `etags_are_md5s`: whether an ETag that has the form of an MD5 must be the
    file's; not so for S3 with keys of KMS. Raises ObjectStoreError, ObjectChanged or OSError after all threads have
    stopped; after Ctrl-C or SIGTERM, it does not wait for those whose request is not answered.
    """
    stop, equal = Event(), list[str]()
    jobs = [_FileDownload(source, file, folder, add_bytes, stop, equal, etags_are_md5s) for file in files]
    daemon_threads.run([job for each in jobs for job in each.ranges()], NUM_THREADS, stop)
    return tuple(equal)


class _FileDownload:
    """The ranges of one file. The thread that ends the last one checks the file and gives it its name."""

    def __init__(
        self,
        source: ObjectFolder,
        file: ObjectFile,
        folder: Path,
        add_bytes: Callable[[int], None],
        stop: Event,
        equal: list[str],
        etags_are_md5s: bool,
    ) -> None:
        self._source = source
        self._file = file
        self._path = folder / file.name
        self._add_bytes = add_bytes
        self._stop = stop
        self._equal = equal
        self._etags_are_md5s = etags_are_md5s
        self._partial = _Partial.read(folder, file)
        self._lock = Lock()
        self._num_left = 0

    def ranges(self) -> Iterator[Callable[[], None]]:
        """Yield a job for each range that is missing; none if the file is complete."""
        if self._path.is_file():
            return
        if not self._partial.done:
            self._partial.begin()
        missing = self._partial.missing()
        self._num_left = len(missing)
        if not missing:
            yield self._finish
        for number in missing:
            yield lambda number=number: self._fetch(number)  # type: ignore[misc]

    def _fetch(self, number: int) -> None:
        if self._stop.is_set():
            raise DownloadStopped
        start, end = self._partial.bounds(number)
        with self._partial.path.open("r+b", buffering=0) as part:
            at = start
            for piece in self._source.read(self._file, start, end):
                if self._stop.is_set():
                    raise DownloadStopped
                if at + len(piece) > end:
                    raise ObjectStoreError(f"{self._source.url}: {self._file.name} did not end at byte {end:,}")
                _write(part.fileno(), piece, at)
                at += len(piece)
                self._add_bytes(len(piece))
            if at != end:
                raise ObjectStoreError(f"{self._source.url}: {self._file.name} ended at byte {at:,} of {end:,}")
            os.fdatasync(part.fileno())
        with self._lock:
            self._partial.record(number)
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._finish()

    def _finish(self) -> None:
        part = self._partial.path
        if part.stat().st_size != self._file.size:
            raise ObjectStoreError(f"{part} has {part.stat().st_size:,} bytes in place of {self._file.size:,}")
        equal = is_md5_equal(part, self._file)
        if equal:
            self._equal.append(self._file.name)
        elif equal is False and self._etags_are_md5s:
            self._partial.remove()
            raise ObjectStoreError(
                f"{self._source.url}: the MD5 of {self._file.name} is not its ETag, unlike that of other files: it was "
                "damaged on its way, or is encrypted in another way; it was deleted: start again, or upload it anew"
            )
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, self._path)
        self._partial.remove()


@dataclass(slots=True)
class _Partial:
    """A file in part, and the numbers of its ranges that are on the disk."""

    path: Path
    file: ObjectFile
    done: set[int]

    @classmethod
    def read(cls, folder: Path, file: ObjectFile) -> "_Partial":
        partial = cls(folder / (file.name + _PART), file, set())
        try:
            head, *lines = partial.record_path.read_text().split("\n")
            is_usable = head == partial._head and partial.path.stat().st_size == file.size
        except (FileNotFoundError, NotADirectoryError):
            return partial
        if is_usable:  # what follows the last line break was not written in full
            partial.done = {int(line) for line in lines[:-1] if line.isdigit()} & set(range(partial.num_ranges))
        return partial

    @property
    def record_path(self) -> Path:
        return self.path.with_name(self.path.name.removesuffix(_PART) + _DONE)

    @property
    def _head(self) -> str:
        return f"{self.file.size} {RANGE_BYTES} {self.file.version}"

    @property
    def num_ranges(self) -> int:
        return max(-(-self.file.size // RANGE_BYTES), 1)

    @property
    def bytes_left(self) -> int:
        return sum(end - start for start, end in map(self.bounds, self.missing()))

    def missing(self) -> list[int]:
        return [number for number in range(self.num_ranges) if number not in self.done]

    def bounds(self, number: int) -> tuple[int, int]:
        """The first byte of a range and the one behind it."""
        return number * RANGE_BYTES, min((number + 1) * RANGE_BYTES, self.file.size)

    def begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.record_path.unlink(missing_ok=True)
        with self.path.open("wb") as file:
            file.truncate(self.file.size)
        self.record_path.write_text(self._head + "\n")

    def record(self, number: int) -> None:
        with self.record_path.open("a") as file:
            file.write(f"{number}\n")
        self.done.add(number)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.record_path.unlink(missing_ok=True)


def is_md5_equal(path: Path, file: ObjectFile) -> bool | None:
    """Whether the ETag of an object is the MD5 of the file, or the MD5 of the MD5s of its parts. None: the ETag has
    another form, or was made of parts of an unknown size."""
    if _MD5.fullmatch(file.version):
        return _md5s(path, file.size)[0].hex() == file.version
    if match := _MD5_OF_PARTS.fullmatch(file.version):
        sizes = (size for size in _PART_SIZES if -(-file.size // size) == int(match[2]))
        if any(
            hashlib.md5(b"".join(_md5s(path, size)), usedforsecurity=False).hexdigest() == match[1] for size in sizes
        ):
            return True
    return None


def _write(descriptor: int, data: bytes, at: int) -> None:
    """Write all of `data`. pwrite(2) on a disk that becomes full writes what fits; the next call raises OSError."""
    left = memoryview(data)
    while left:
        num_bytes = os.pwrite(descriptor, left, at)
        at += num_bytes
        left = left[num_bytes:]


def _md5s(path: Path, part_size: int) -> list[bytes]:
    """The MD5 of each part of a file."""
    parts = list[bytes]()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while not parts or file.tell() < size:
            part, left = hashlib.md5(usedforsecurity=False), part_size
            while left and (piece := file.read(min(left, _READ_BYTES))):
                part.update(piece)
                left -= len(piece)
            parts.append(part.digest())
    return parts
