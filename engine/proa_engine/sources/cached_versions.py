"""What the folder of a `DownloadCache` has: the versions of a model's files, their sizes, and the locks of flock(2)."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from proa_engine.observability.progress import gigabytes
from proa_engine.sources.object_store import ObjectFile

WAIT_SECONDS = 10.0  # between two lines of a process that waits for another one's download
_POLL_SECONDS = 0.2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects under a prefix are wanted, among them `needed`: those that match `patterns`; and if `with_weights`
    those that match `weights`, without the ones that the file `index` does not name."""

    needed: str
    patterns: Collection[str]
    weights: Collection[str]
    index: str | None = None
    with_weights: bool = True

    def is_weight(self, name: str) -> bool:
        return _matches(name, self.weights)

    def all(self, files: Iterable[ObjectFile]) -> list[ObjectFile]:
        """Without regard to `with_weights`."""
        return [each for each in files if _matches(each.name, (*self.patterns, *self.weights))]

    def small(self, files: Iterable[ObjectFile]) -> list[ObjectFile]:
        return [each for each in files if _matches(each.name, self.patterns)]

    def large(self, files: Iterable[ObjectFile], folder: Path) -> list[ObjectFile]:
        """`folder` has the small files."""
        if not self.with_weights:
            return []
        weights = [each for each in files if self.is_weight(each.name)]
        named = self._named(folder, {each.name for each in weights})
        return [each for each in weights if "/" in each.name or named is None or each.name in named]

    def _named(self, folder: Path, present: Collection[str]) -> Collection[str] | None:
        if self.index is None:
            return None
        try:
            return set(map(str, json.loads((folder / self.index).read_bytes())["weight_map"].values()))
        except FileNotFoundError:
            single = self.index.removesuffix(".index.json")
            return {single} if single in present else None
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # refused where the weights are read
            return None


@dataclass(frozen=True, slots=True)
class Version:
    """The objects that were under a prefix at a time, and the folder for them."""

    folder: Path
    files: tuple[ObjectFile, ...]

    @classmethod
    def of(cls, model: Path, files: Sequence[ObjectFile]) -> "Version":
        names = "\n".join(f"{each.name}\t{each.size}\t{each.version}" for each in files)
        return cls(model / hashlib.sha256(names.encode()).hexdigest()[:12], tuple(files))

    @property
    def lock_path(self) -> Path:
        return self.folder.with_name(self.folder.name + ".lock")

    @property
    def list_path(self) -> Path:
        return self.folder.with_name(self.folder.name + ".json")

    @property
    def used_at(self) -> float:
        return self.lock_path.stat().st_mtime

    def use(self) -> int:
        """Keep the folder until the descriptor that is returned is closed, or this process ends. Other programs do not
        inherit it."""
        descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        now = time.time_ns()  # the kernel's own time of a file has a resolution of milliseconds
        os.utime(descriptor, ns=(now, now))
        return descriptor

    def is_complete(self, selection: Selection) -> bool:
        small = selection.small(self.files)
        if not any(each.name == selection.needed for each in self.files):  # of another selection
            return False
        return self._has(small) and self._has(selection.large(self.files, self.folder))

    def _has(self, files: Iterable[ObjectFile]) -> bool:
        return all((self.folder / each.name).is_file() for each in files)

    def begin(self) -> None:
        self.folder.mkdir(exist_ok=True)
        written = self.list_path.with_suffix(".new")
        written.write_text(json.dumps([asdict(each) for each in self.files]))
        os.replace(written, self.list_path)

    def delete(self) -> None:
        self.list_path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a folder: of all its files, with its share of those that other folders have too; of those that no other
    has; and those of files in part that take no room on the disk yet."""

    total: int
    own: int
    promised: int

    @classmethod
    def of(cls, folder: Path) -> "Sizes":
        found = [each.stat() for each in folder.rglob("*") if each.is_file()]
        return cls(
            sum(each.st_size // each.st_nlink for each in found),
            sum(each.st_size for each in found if each.st_nlink == 1),
            sum(max(each.st_size - 512 * each.st_blocks, 0) for each in found),
        )


class Unused:
    """Holds the exclusive locks of versions that no process uses."""

    def __init__(self, versions: list[Version], descriptors: list[int]) -> None:
        self._versions = versions
        self._descriptors = descriptors

    @classmethod
    def of(cls, versions: Iterable[Version]) -> "Unused":
        held, descriptors = [], []
        for each in versions:
            descriptor = os.open(each.lock_path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            held.append(each)
            descriptors.append(descriptor)
        return cls(held, descriptors)

    def __enter__(self) -> list[Version]:
        return self._versions

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


@contextmanager
def exclusive(path: Path, url: str) -> Iterator[Callable[[int, int], None]]:
    """Hold the lock, and yield a function that tells waiting processes how many bytes of how many are there."""
    with path.open("a+") as file:
        started = reported = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now - reported >= WAIT_SECONDS:
                    reported = now
                    _log.info("waiting for %.0f s for %s: %s", now - started, url, _holder(path))
                time.sleep(_POLL_SECONDS)
        me, written = f"process {os.getpid()} on {socket.gethostname()}", 0.0

        def tell(done: int, total: int) -> None:
            nonlocal written
            if (now := time.monotonic()) - written > 1.0:
                written = now
                file.truncate(0)
                file.write(f"{me} downloads it: {gigabytes(done)} of {gigabytes(total)} GB ({100 * done // total} %)")
                file.flush()

        try:
            file.truncate(0)
            file.write(f"{me} has its lock")
            file.flush()
            yield tell
        finally:
            file.truncate(0)


def versions_of(model: Path) -> list[Version]:
    """The versions of a URL, those in part too."""
    found = []
    for path in model.glob("*.json"):
        files = [ObjectFile(**each) for each in json.loads(path.read_bytes())]
        found.append(Version(path.with_suffix(""), tuple(files)))
    return found


def _holder(path: Path) -> str:
    return path.read_text() or "another process has its lock"


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
