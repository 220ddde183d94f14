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

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from threading import Lock

from proa.logs import with_fields
from proa_engine.observability.progress import Progress, gigabytes
from proa_engine.sources.cached_versions import Selection, Sizes, Unused, Version, exclusive, versions_of
from proa_engine.sources.object_download import allocate, bytes_left, bytes_not_begun, download, is_md5_equal
from proa_engine.sources.object_store import (
    ObjectChanged,
    ObjectFile,
    ObjectFolder,
    ObjectStoreError,
    StoreUnreachable,
)

_MAX_SMALL_BYTES = 256 << 20  # of a file that is no weights: a tokenizer of the largest published ones has 35 MB
_MAX_BYTES = 16 << 40  # of all files: a model of a trillion parameters has 2 TB
_NUM_TRIES = 3  # of a model that is replaced while it is downloaded
_log = logging.getLogger(__name__)


class DownloadCache:
    """`max_bytes`: of all files in it; None: as many as the disk has room for."""

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self._root = folder / "object-store"
        self._max_bytes = max_bytes

    def fetch(self, source: ObjectFolder, selection: Selection, *, until_exit: bool = True) -> Path:
        """Return the folder of the selected files, after those that are not in the cache are downloaded.

        `until_exit`: keep them until this process ends, otherwise only as others that were used last are kept. If the
        store cannot be reached, the version that was used last is returned if it is complete.
        """
        for _ in range(_NUM_TRIES):
            try:
                return self._fetch(source, selection, until_exit)
            except ObjectChanged as changed:
                _log.warning("%s: %s was replaced in mid-download: starting over", source.url, changed)
        raise ObjectStoreError(f"{source.url} is replaced again and again while it is downloaded; start again later")

    def _fetch(self, source: ObjectFolder, selection: Selection, until_exit: bool) -> Path:
        model = self._root / _name_of(source.url)
        try:
            files = source.files()
        except StoreUnreachable as error:
            if (kept := _last_complete(model, selection)) is None:
                raise
            _log.warning("%s; using the files of its last download, in %s", error, kept.folder)
            version = kept
        else:
            _check_listed(source.url, files, selection)
            _check_sizes(source.url, files, selection)
            version = Version.of(model, selection.all(files))
            model.mkdir(parents=True, exist_ok=True)
        in_use, is_kept = version.use(), False
        try:
            if not version.is_complete(selection):
                with exclusive(model / "lock", source.url) as status:
                    self._download(source, version, selection, status)
            is_kept = until_exit
        finally:
            if not is_kept:
                os.close(in_use)
        return version.folder

    def _download(
        self, source: ObjectFolder, version: Version, selection: Selection, status: Callable[[int, int], None]
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

    def _reuse(self, version: Version) -> None:
        """Link the files that another version of the same URL has too, and delete the other versions' files in part."""
        wanted = {(each.name, each.version): each for each in version.files}
        for other in versions_of(version.folder.parent):
            if other.folder == version.folder:
                continue
            for each in other.files:
                held, own = other.folder / each.name, version.folder / each.name
                if wanted.get((each.name, each.version)) == each and held.is_file() and not own.exists():
                    own.parent.mkdir(parents=True, exist_ok=True)
                    os.link(held, own)
            for part in [*other.folder.rglob("*.part"), *other.folder.rglob("*.part.done")]:
                part.unlink()

    def _allocate(self, url: str, version: Version, files: Sequence[ObjectFile]) -> None:
        """Reserve room for `files`: each has a .part of its full size, which the next process counts."""
        with exclusive(self._root / "lock", url):
            self._make_room(url, version, files)
            allocate(version.folder, files)

    def _make_room(self, url: str, version: Version, files: Sequence[ObjectFile]) -> None:
        """Delete the versions that were used least recently until there is room for `files`. Raises ObjectStoreError
        before anything is deleted if that is not enough."""
        versions = [each for model in self._root.iterdir() if model.is_dir() for each in versions_of(model)]
        sizes = {each.folder: Sizes.of(each.folder) for each in versions}
        promised_to_others = sum(sizes[each.folder].promised for each in versions if each.folder != version.folder)
        needed = bytes_left(version.folder, files)
        lacking = needed + promised_to_others - shutil.disk_usage(self._root).free
        if self._max_bytes is not None:
            begun = sum(each.total for each in sizes.values())
            lacking = max(lacking, begun + bytes_not_begun(version.folder, files) - self._max_bytes)
        if lacking <= 0:
            return
        unused = sorted((each for each in versions if each.folder != version.folder), key=lambda each: each.used_at)
        with Unused.of(unused) as deletable:
            too_few = lacking - sum(sizes[each.folder].own for each in deletable)
            if too_few > 0:
                raise ObjectStoreError(self._refusal(url, needed, too_few))
            for each in deletable:
                if lacking > 0:
                    _log.info("deleting %s, which no process uses, to make room for %s", each.folder, url)
                    lacking -= sizes[each.folder].own
                    each.delete()

    def _refusal(self, url: str, needed: int, too_few: int) -> str:
        bound = f", bounded to {gigabytes(self._max_bytes)} GB (download_cache_size)" if self._max_bytes else ""
        return (
            f"{url} needs {gigabytes(needed)} GB more in {self._root.parent} (download_dir){bound}: if all models that "
            f"no process uses were deleted, {gigabytes(too_few)} GB would be lacking"
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


def _last_complete(model: Path, selection: Selection) -> Version | None:
    complete = [each for each in versions_of(model) if each.is_complete(selection)]
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
    inner = sorted((each for each in names if each.endswith(f"/{selection.needed}")), key=lambda each: each.count("/"))
    hint = f"; did you mean {url.rstrip('/')}/{inner[0].rpartition('/')[0]}?" if inner else ""
    raise ObjectStoreError(f"there is no {selection.needed} under {url}{hint}")


def _check_sizes(url: str, files: Sequence[ObjectFile], selection: Selection) -> None:
    """Raise ObjectStoreError for sizes that no model has, before room for them is looked for."""
    for each in selection.small(files):
        if each.size > _MAX_SMALL_BYTES:
            raise ObjectStoreError(
                f"{url}: {each.name} has {each.size:,} bytes; supported: at most {_MAX_SMALL_BYTES:,} for a file that "
                "holds no weights"
            )
    total = sum(each.size for each in selection.all(files))
    if total > _MAX_BYTES:
        raise ObjectStoreError(f"{url}: the files have {total:,} bytes; supported: at most {_MAX_BYTES:,}")


def _report_unnamed(url: str, selection: Selection, files: Iterable[ObjectFile], large: Collection[ObjectFile]) -> None:
    others = [each.name for each in files if selection.is_weight(each.name) and each not in large]
    if others:
        _log.info("%s: not downloading %s, which no engine reads", url, ", ".join(others))
