"""The folder on a node in which objects of object stores are kept: one download for all processes that share it, none
of files that have not changed, and room made by deleting what no process uses.

    FOLDER/object-store/
    ├── lock                         exclusive while room is made
    └── s3-BUCKET-PREFIX-<digest>/   of a URL
        ├── lock                     exclusive while its files are downloaded; has who does that, and how far it is
        ├── <version>.lock           shared by processes that use the files, or download them; its time is the last use
        ├── <version>.json           the objects under the prefix, with sizes and ETags
        └── <version>/               the model's folder

The version is a digest of names, sizes and ETags, so a model that is replaced under its prefix has another folder, and
an engine that runs keeps its own. Files that are equal in both are one file with two links. Locks are those of
flock(2), which the kernel frees when a process ends, however it ends. Raises ObjectStoreError, or OSError.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock

from proa.logs import with_fields
from proa_engine.models.object_download import allocate, bytes_left, bytes_not_begun, download, is_md5_equal
from proa_engine.models.object_store import (
    ObjectChanged,
    ObjectFile,
    ObjectFolder,
    ObjectStoreError,
    StoreUnreachable,
)
from proa_engine.observability.progress import Progress, gigabytes

WAIT_SECONDS = 10.0  # between two lines of a process that waits for another one's download
_POLL_SECONDS = 0.2
_NUM_TRIES = 3  # of a model that is replaced while it is downloaded
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects under a prefix are wanted: those that match `patterns`, among them `needed`; and if `with_weights`
    those that match `weights`, without the ones that the file `index` does not name."""

    needed: str
    patterns: Collection[str]
    weights: Collection[str]
    index: str | None = None
    with_weights: bool = True

    def all(self, files: Iterable[ObjectFile]) -> list[ObjectFile]:
        """Without regard to `with_weights`."""
        return [each for each in files if _matches(each.name, (*self.patterns, *self.weights))]

    def small(self, files: Iterable[ObjectFile]) -> list[ObjectFile]:
        return [each for each in files if _matches(each.name, self.patterns)]

    def large(self, files: Iterable[ObjectFile], folder: Path) -> list[ObjectFile]:
        """`folder` has the small files."""
        if not self.with_weights:
            return []
        weights = [each for each in files if _matches(each.name, self.weights)]
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
        except (ValueError, KeyError, AttributeError, TypeError):  # refused where the weights are read
            return None


class DownloadCache:
    """`max_bytes`: of all files in it; None: as many as the disk has room for."""

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self._root = folder / "object-store"
        self._max_bytes = max_bytes

    def fetch(self, source: ObjectFolder, selection: Selection) -> Path:
        """Return the folder of the selected files, after those that are not in the cache are downloaded. They are kept
        until this process ends. If the store cannot be reached, the version that was used last is returned if it is
        complete."""
        for _ in range(_NUM_TRIES):
            try:
                return self._fetch(source, selection)
            except ObjectChanged as changed:
                _log.warning("%s: %s was replaced in mid-download: starting over", source.url, changed)
        raise ObjectStoreError(f"{source.url} is replaced again and again while it is downloaded; start again later")

    def _fetch(self, source: ObjectFolder, selection: Selection) -> Path:
        model = self._root / _name_of(source.url)
        try:
            files = source.files()
        except StoreUnreachable as error:
            if (kept := _last_complete(model, selection)) is None:
                raise
            _log.warning("%s; using the files of its last download, in %s", error, kept.folder)
            kept.use()
            return kept.folder
        _check_listed(source.url, files, selection)
        version = _Version.of(model, selection.all(files))
        model.mkdir(parents=True, exist_ok=True)
        version.use()
        if not version.is_complete(selection):
            with _exclusive(model / "lock", source.url) as status:
                self._download(source, version, selection, status)
        return version.folder

    def _download(
        self, source: ObjectFolder, version: "_Version", selection: Selection, status: Callable[[int, int], None]
    ) -> None:
        version.begin()
        self._reuse(version)
        small = selection.small(version.files)
        download(source, small, version.folder, lambda _: None, etags_are_md5s=False)
        large = selection.large(version.files, version.folder)
        self._allocate(source.url, version, large)
        if not (left := bytes_left(version.folder, large)):
            return
        _report_unnamed(source.url, selection, version.files, large)
        etags_are_md5s = any(is_md5_equal(version.folder / each.name, each) for each in small)
        total, started = sum(each.size for each in large), time.monotonic()
        resumed = f", after {gigabytes(total - left)} GB of an earlier download" if left < total else ""
        _log.info("downloading %s GB of %s%s", gigabytes(left), source.url, resumed)
        progress = Progress(_log.info, f"downloading {source.url}", left, "GB", scale=1e9)
        count = _Count(progress, status, total - left, total)
        equal = download(source, large, version.folder, count.add, etags_are_md5s=etags_are_md5s)
        seconds = time.monotonic() - started
        _log.info(
            "downloaded %s in %.1f s, %.2f GB/s; the MD5 of %d of %d files is the store's",
            source.url,
            seconds,
            left / 1e9 / seconds,
            len(equal),
            len(large),
            extra=with_fields(num_bytes=left, duration_ms=round(1000 * seconds, 1)),
        )

    def _reuse(self, version: "_Version") -> None:
        """Link the files that another version of the same URL has too, and delete the other versions' files in part."""
        wanted = {(each.name, each.version): each for each in version.files}
        for other in _versions(version.folder.parent):
            if other.folder == version.folder:
                continue
            for each in other.files:
                held, own = other.folder / each.name, version.folder / each.name
                if wanted.get((each.name, each.version)) == each and held.is_file() and not own.exists():
                    own.parent.mkdir(parents=True, exist_ok=True)
                    os.link(held, own)
            for part in [*other.folder.rglob("*.part"), *other.folder.rglob("*.part.done")]:
                part.unlink()

    def _allocate(self, url: str, version: "_Version", files: Sequence[ObjectFile]) -> None:
        """Reserve room for `files`: each has a .part of its full size, which the next process counts."""
        with _exclusive(self._root / "lock", url):
            self._make_room(url, version, files)
            allocate(version.folder, files)

    def _make_room(self, url: str, version: "_Version", files: Sequence[ObjectFile]) -> None:
        """Delete the versions that were used least recently until there is room for `files`. Raises ObjectStoreError
        before anything is deleted if that is not enough."""
        versions = [each for model in self._root.iterdir() if model.is_dir() for each in _versions(model)]
        sizes = {each.folder: _Sizes.of(each.folder) for each in versions}
        promised_to_others = sum(sizes[each.folder].promised for each in versions if each.folder != version.folder)
        needed = bytes_left(version.folder, files)
        lacking = needed + promised_to_others - shutil.disk_usage(self._root).free
        if self._max_bytes is not None:
            begun = sum(each.total for each in sizes.values())
            lacking = max(lacking, begun + bytes_not_begun(version.folder, files) - self._max_bytes)
        if lacking <= 0:
            return
        unused = sorted((each for each in versions if each.folder != version.folder), key=lambda each: each.used_at)
        with _Unused.of(unused) as deletable:
            if sum(sizes[each.folder].own for each in deletable) < lacking:
                raise ObjectStoreError(self._refusal(url, needed, lacking))
            for each in deletable:
                if lacking > 0:
                    _log.info("deleting %s, which no process uses, to make room for %s", each.folder, url)
                    lacking -= sizes[each.folder].own
                    each.delete()

    def _refusal(self, url: str, needed: int, lacking: int) -> str:
        bound = f" of {gigabytes(self._max_bytes)} GB (download_cache_size)" if self._max_bytes is not None else ""
        return (
            f"{url} needs {gigabytes(needed)} GB more in {self._root.parent}{bound}, {gigabytes(lacking)} GB more than "
            "there is room for, even without the models that no process uses; give a larger one (download_dir)"
        )


class _Count:
    """Counts bytes, from several threads, for the log and for processes that wait."""

    def __init__(self, progress: Progress, status: Callable[[int, int], None], done: int, total: int) -> None:
        self._progress = progress
        self._status = status
        self._done = done
        self._total = total
        self._lock = Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._progress.add(num_bytes)
            self._status(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Version:
    """The objects that were under a prefix at a time, and the folder for them."""

    folder: Path
    files: tuple[ObjectFile, ...]

    @classmethod
    def of(cls, model: Path, files: Sequence[ObjectFile]) -> "_Version":
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

    def use(self) -> None:
        """Keep the folder until this process ends: the descriptor is never closed, and other programs do not inherit
        it."""
        descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)

    def is_complete(self, selection: Selection) -> bool:
        small = selection.small(self.files)
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
class _Sizes:
    """Bytes of a folder: of all its files, with its share of those that other folders have too; of those that no other
    has; and those of files in part that take no room on the disk yet."""

    total: int
    own: int
    promised: int

    @classmethod
    def of(cls, folder: Path) -> "_Sizes":
        found = [each.stat() for each in folder.rglob("*") if each.is_file()]
        return cls(
            sum(each.st_size // each.st_nlink for each in found),
            sum(each.st_size for each in found if each.st_nlink == 1),
            sum(max(each.st_size - 512 * each.st_blocks, 0) for each in found),
        )


class _Unused:
    """Holds the exclusive locks of versions that no process uses."""

    def __init__(self, versions: list[_Version], descriptors: list[int]) -> None:
        self._versions = versions
        self._descriptors = descriptors

    @classmethod
    def of(cls, versions: Iterable[_Version]) -> "_Unused":
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

    def __enter__(self) -> list[_Version]:
        return self._versions

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


@contextmanager
def _exclusive(path: Path, url: str) -> Iterator[Callable[[int, int], None]]:
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


def _holder(path: Path) -> str:
    return path.read_text() or "another process has its lock"


def _versions(model: Path) -> list[_Version]:
    """The versions of a URL, those in part too."""
    found = []
    for path in model.glob("*.json"):
        files = [ObjectFile(**each) for each in json.loads(path.read_bytes())]
        found.append(_Version(path.with_suffix(""), tuple(files)))
    return found


def _last_complete(model: Path, selection: Selection) -> _Version | None:
    complete = [each for each in _versions(model) if each.is_complete(selection)]
    return max(complete, key=lambda each: each.used_at, default=None)


def _name_of(url: str) -> str:
    text = url.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", text)[:80].strip("-.")
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _check_listed(url: str, files: Sequence[ObjectFile], selection: Selection) -> None:
    names = {each.name for each in files}
    if selection.needed in names:
        return
    if not names:
        raise ObjectStoreError(f"there is nothing under {url}: is the prefix spelled right?")
    inner = sorted(each for each in names if each.endswith(f"/{selection.needed}"))
    hint = f"; did you mean {url.rstrip('/')}/{inner[0].rpartition('/')[0]}?" if inner else ""
    raise ObjectStoreError(f"there is no {selection.needed} under {url}{hint}")


def _report_unnamed(url: str, selection: Selection, files: Iterable[ObjectFile], large: Collection[ObjectFile]) -> None:
    others = [each.name for each in files if _matches(each.name, selection.weights) and each not in large]
    if others:
        _log.info("%s: not downloading %s, which no engine reads", url, ", ".join(others))


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
