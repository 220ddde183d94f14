"""Files of an object store are downloaded once, resumed, checked, kept while in use, and deleted for others."""

import errno
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from obstore.store import LocalStore, MemoryStore

from proa_engine.sources import cached_versions, object_download
from proa_engine.sources.cached_versions import Selection
from proa_engine.sources.download_cache import DownloadCache
from proa_engine.sources.object_store import (
    ObjectChanged,
    ObjectFile,
    ObjectFolder,
    ObjectStoreError,
    StoreUnreachable,
)

MODEL = Selection("config.json", ["*.json"], ["*.safetensors"], "model.safetensors.index.json")
CONFIG = Selection("config.json", ["*.json"], ["*.safetensors"], "model.safetensors.index.json", with_weights=False)
RANGE = 1000
WEIGHTS = os.urandom(4 * RANGE + 1)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "1_Pooling/config.json": b"{ }"}


class Bucket(ObjectFolder):
    """Objects in memory, whose ETags are MD5s unless `versions` has others. `faults`: raised by the reads that come
    next, None by one that succeeds."""

    def __init__(self, objects: Mapping[str, bytes] = FILES, versions: Mapping[str, str] | None = None) -> None:
        super().__init__("s3://bucket/model", MemoryStore())
        self.objects = dict(objects)
        self.versions = dict(versions or {})
        self.unreachable = False
        self.faults: list[Exception | None] = []
        self.num_bytes = 0
        self.read_names: list[str] = []

    def files(self) -> list[ObjectFile]:
        if self.unreachable:
            raise StoreUnreachable("the store cannot be reached")
        return [ObjectFile(name, len(data), self.version(name)) for name, data in sorted(self.objects.items())]

    def version(self, name: str) -> str:
        return self.versions.get(name, hashlib.md5(self.objects[name]).hexdigest())

    def read(self, file: ObjectFile, start: int, end: int) -> Iterator[bytes]:
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        if self.version(file.name) != file.version:
            raise ObjectChanged(file.name)
        self.read_names.append(file.name)
        self.num_bytes += end - start
        yield self.objects[file.name][start:end]


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_download, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(object_download, "NUM_THREADS", 1)


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        ("tokenizer.json", 2**60, "tokenizer.json has 1,152,921,504,606,846,976 bytes; supported: at most 268,435,456"),
        (
            "model.safetensors",
            2**60,
            "the files have 1,152,921,504,606,846,978 bytes; supported: at most 17,592,186,044",
        ),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_written(
    name: str, size: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [ObjectFile("config.json", 2, "v"), ObjectFile(name, size, "v")]
    bucket = Bucket()
    monkeypatch.setattr(bucket, "files", lambda: listed)
    with pytest.raises(ObjectStoreError, match=f"s3://bucket/model: {sentence}"):
        DownloadCache(tmp_path).fetch(bucket, MODEL)
    assert not files_of(tmp_path)


def test_an_object_that_does_not_end_is_not_written_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(file: ObjectFile, start: int, end: int) -> Iterator[bytes]:
        while True:
            yield b"x" * (end - start)

    bucket = Bucket()
    monkeypatch.setattr(bucket, "read", read)
    with pytest.raises(ObjectStoreError, match=r"s3://bucket/model: .*config\.json did not end at byte \d"):
        DownloadCache(tmp_path).fetch(bucket, MODEL)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_files_are_downloaded_once(tmp_path: Path) -> None:
    bucket, cache = Bucket(), DownloadCache(tmp_path)
    folder = cache.fetch(bucket, MODEL)
    assert files_of(folder) == FILES
    assert bucket.num_bytes == sum(map(len, FILES.values()))
    assert cache.fetch(bucket, MODEL) == folder
    assert bucket.num_bytes == sum(map(len, FILES.values()))


def test_weights_come_to_the_folder_of_the_small_files(tmp_path: Path) -> None:
    bucket, cache = Bucket(), DownloadCache(tmp_path)
    folder = cache.fetch(bucket, CONFIG)
    assert files_of(folder).keys() == FILES.keys() - {"model.safetensors"}
    assert cache.fetch(bucket, MODEL) == folder
    assert files_of(folder) == FILES
    assert bucket.num_bytes == sum(map(len, FILES.values()))


def test_a_real_store_of_the_library_is_listed_and_read(tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / "bucket" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bucket" / name).write_bytes(data)
    source = ObjectFolder("s3://bucket", LocalStore(tmp_path / "bucket"))
    assert files_of(DownloadCache(tmp_path / "cache").fetch(source, MODEL)) == FILES


def test_a_download_that_ended_continues_with_the_missing_ranges(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, cache = Bucket(), DownloadCache(tmp_path)
    bucket.faults = [*[None] * 4, ObjectStoreError("cut")]  # two small files, two of five ranges
    with pytest.raises(ObjectStoreError, match="cut"):
        cache.fetch(bucket, MODEL)
    with caplog.at_level(logging.INFO, "proa_engine"):
        folder = cache.fetch(bucket, MODEL)
    assert files_of(folder) == FILES
    assert bucket.num_bytes == sum(map(len, FILES.values())), "no range was read twice"
    assert "after 0.0000 GB of an earlier download" in caplog.text


def test_a_record_that_was_not_written_in_full_counts_up_to_its_last_line(tmp_path: Path) -> None:
    bucket, cache = Bucket(), DownloadCache(tmp_path)
    bucket.faults = [*[None] * 4, ObjectStoreError("cut")]
    with pytest.raises(ObjectStoreError):
        cache.fetch(bucket, MODEL)
    (record,) = tmp_path.rglob("*.part.done")
    record.write_text(record.read_text() + "3")
    assert files_of(cache.fetch(bucket, MODEL)) == FILES


def test_a_model_that_is_replaced_gets_another_folder_and_shares_equal_files(tmp_path: Path) -> None:
    bucket, cache = Bucket(), DownloadCache(tmp_path)
    first = cache.fetch(bucket, MODEL)
    bucket.objects["config.json"] = b'{"new": 1}'
    bucket.read_names.clear()
    second = cache.fetch(bucket, MODEL)
    assert second != first
    assert bucket.read_names == ["config.json"]
    assert files_of(first) == FILES
    assert files_of(second) == bucket.objects
    assert (second / "model.safetensors").samefile(first / "model.safetensors")


def test_an_object_that_changes_in_mid_download_starts_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bucket, cache = Bucket(), DownloadCache(tmp_path)
    bucket.faults = [*[None] * 4, ObjectChanged("model.safetensors")]
    listed = bucket.files

    def files() -> list[ObjectFile]:
        if len(bucket.read_names) >= 4:
            bucket.objects["model.safetensors"] = WEIGHTS[::-1]
        return listed()

    bucket.files = files  # type: ignore[method-assign]
    folder = cache.fetch(bucket, MODEL)
    assert files_of(folder) == bucket.objects
    assert "model.safetensors was replaced in mid-download: starting over" in caplog.text
    assert not list(tmp_path.rglob("*.part*"))


def test_without_the_store_the_last_download_is_used_if_it_is_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, cache = Bucket(), DownloadCache(tmp_path)
    folder = cache.fetch(bucket, CONFIG)
    bucket.unreachable = True
    assert cache.fetch(bucket, CONFIG) == folder
    assert f"the store cannot be reached; using the files of its last download, in {folder}" in caplog.text
    with pytest.raises(StoreUnreachable):
        cache.fetch(bucket, MODEL)


def test_a_damaged_file_is_refused_where_etags_are_md5s(tmp_path: Path) -> None:
    bucket = Bucket(versions={"model.safetensors": "0" * 32})
    with pytest.raises(ObjectStoreError, match=r"the MD5 of model\.safetensors is not its ETag"):
        DownloadCache(tmp_path).fetch(bucket, MODEL)
    assert not list(tmp_path.rglob("model.safetensors*"))


def test_etags_that_are_no_md5s_are_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket(versions=dict.fromkeys(FILES, "0" * 32))
    with caplog.at_level(logging.INFO, "proa_engine"):
        assert files_of(DownloadCache(tmp_path).fetch(bucket, MODEL)) == FILES
    assert "the MD5 of 0 of 1 files is the store's" in caplog.text


def test_the_etag_of_an_upload_in_parts_is_the_md5_of_their_md5s(tmp_path: Path) -> None:
    path, data = tmp_path / "weights", os.urandom((8 << 20) + 5)
    path.write_bytes(data)
    parts = b"".join(hashlib.md5(part).digest() for part in (data[: 8 << 20], data[8 << 20 :]))
    of_parts = f"{hashlib.md5(parts).hexdigest()}-2"
    assert object_download.is_md5_equal(path, ObjectFile("weights", len(data), of_parts)) is True
    assert object_download.is_md5_equal(path, ObjectFile("weights", len(data), f"{'0' * 32}-2")) is None
    assert object_download.is_md5_equal(path, ObjectFile("weights", len(data), "0x8DB")) is None


def test_weights_that_the_index_does_not_name_are_not_downloaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()
    names = ("model-1.safetensors", "consolidated.safetensors", "2_Dense/model.safetensors")
    bucket = Bucket({**dict.fromkeys(names, b"w"), "config.json": b"{}", "model.safetensors.index.json": index})
    with caplog.at_level(logging.INFO, "proa_engine"):
        folder = DownloadCache(tmp_path).fetch(bucket, MODEL)
    assert files_of(folder).keys() == bucket.objects.keys() - {"consolidated.safetensors"}
    assert "not downloading consolidated.safetensors, which no engine reads" in caplog.text


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ((), "there is nothing under s3://bucket/model: is the prefix spelled right?"),
        (("README.md",), "there is no config.json under s3://bucket/model$"),
        (
            ("v1/1_Pooling/config.json", "v1/config.json"),
            "there is no config.json under s3://bucket/model; did you mean s3://bucket/model/v1?",
        ),
    ],
)
def test_a_prefix_without_a_model_is_named(names: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ObjectStoreError, match=sentence.replace("?", r"\?")):
        DownloadCache(tmp_path).fetch(Bucket(dict.fromkeys(names, b"")), MODEL)
    assert not list(tmp_path.rglob("*"))


FETCH = """
import sys
from pathlib import Path
from obstore.store import LocalStore
from proa_engine.sources.cached_versions import Selection
from proa_engine.sources.download_cache import DownloadCache
from proa_engine.sources.object_store import ObjectFolder
selection = Selection("config.json", ["*.json"], ["*.safetensors"])
for name in sys.argv[3:]:
    source = ObjectFolder(f"s3://bucket/{name}", LocalStore(sys.argv[1]))
    print(DownloadCache(Path(sys.argv[2])).fetch(source, selection))
"""


@pytest.fixture
def old(tmp_path: Path) -> list[Path]:
    """Folders of two models of 4,003 bytes, the first of which was used last by processes that have ended."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "config.json").write_bytes(b"{}")
    (tmp_path / "bucket" / "model.safetensors").write_bytes(WEIGHTS)
    words = (sys.executable, "-c", FETCH, str(tmp_path / "bucket"), str(tmp_path / "cache"), "new", "old", "new")
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    new, least_recent, _ = map(Path, printed.splitlines())
    os.utime(least_recent.with_name(least_recent.name + ".lock"), (0, 0))
    return [new, least_recent]


def test_the_model_used_least_recently_is_deleted_for_another(
    old: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "proa_engine"):
        folder = DownloadCache(tmp_path / "cache", 10_000).fetch(Bucket(), MODEL)
    assert files_of(folder) == FILES
    assert [each.exists() for each in old] == [True, False]
    assert f"deleting {old[1]}, which no process uses, to make room for s3://bucket/model" in caplog.text


def test_a_model_in_use_is_not_deleted(old: list[Path], tmp_path: Path) -> None:
    source = ObjectFolder("s3://bucket/old", LocalStore(tmp_path / "bucket"))
    assert (
        DownloadCache(tmp_path / "cache").fetch(source, Selection("config.json", ["*.json"], ["*.safetensors"]))
        == old[1]
    )
    os.utime(old[1].with_name(old[1].name + ".lock"), (0, 0))
    DownloadCache(tmp_path / "cache", 10_000).fetch(Bucket(), MODEL)
    assert [each.exists() for each in old] == [False, True]


def test_an_adapter_is_kept_no_longer_than_it_is_read(tmp_path: Path) -> None:
    cache, num_open = DownloadCache(tmp_path, 10_000), len(os.listdir("/proc/self/fd"))
    folders = []
    for number in range(3):
        objects = {"config.json": b"%d" % number, "model.safetensors": os.urandom(len(WEIGHTS))}
        folders.append(cache.fetch(Bucket(objects), MODEL, until_exit=False))
    assert [each.exists() for each in folders] == [False, True, True]
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_model_without_room_is_refused_before_anything_is_deleted(old: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ObjectStoreError, match=r"\(download_dir\), bounded to 0.0000 GB \(download_cache_size\): "):
        DownloadCache(tmp_path / "cache", 3_000).fetch(Bucket(), MODEL)
    assert all((each / "model.safetensors").exists() for each in old)


def test_a_model_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 3_000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(ObjectStoreError, match=r"needs 0.0000 GB more in .* GB would be lacking"):
        DownloadCache(tmp_path).fetch(Bucket(), MODEL)


def test_a_disk_that_becomes_full_in_mid_write_leaves_no_file_with_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, pwrite = 2 * RANGE + 100, os.pwrite

    def write_what_fits(descriptor: int, data: bytes, at: int) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_bytes = pwrite(descriptor, data[:room], at)
        room -= num_bytes
        return num_bytes

    without_md5s = Bucket(versions=dict.fromkeys(FILES, "0x8DC"))
    with monkeypatch.context() as full:
        full.setattr("os.pwrite", write_what_fits)
        with pytest.raises(OSError, match="No space left on device"):
            DownloadCache(tmp_path).fetch(without_md5s, MODEL)
    assert not list(tmp_path.rglob("model.safetensors"))
    assert files_of(DownloadCache(tmp_path).fetch(without_md5s, MODEL)) == FILES


def test_others_wait_for_a_download_and_tell_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cached_versions, "WAIT_SECONDS", 0.0)
    bucket, reached, told = Bucket(), threading.Event(), threading.Event()
    read, folders = bucket.read, list[Path]()

    def slow(file: ObjectFile, start: int, end: int) -> Iterator[bytes]:
        if start == RANGE:
            reached.set()
            assert told.wait(60)
        yield from read(file, start, end)

    bucket.read = slow  # type: ignore[method-assign]
    threads = [threading.Thread(target=lambda: folders.append(DownloadCache(tmp_path).fetch(bucket, MODEL)))]
    with caplog.at_level(logging.INFO, "proa_engine"):
        threads[0].start()
        assert reached.wait(60)
        threads += [threading.Thread(target=lambda: folders.append(DownloadCache(tmp_path).fetch(bucket, MODEL)))]
        threads[1].start()
        while not (lines := [each for each in caplog.messages if each.startswith("waiting for")]):
            assert threads[1].is_alive()
        told.set()
        for thread in threads:
            thread.join(60)
    assert f"for s3://bucket/model: process {os.getpid()} on " in lines[0]
    assert "downloads it: 0.0000 of 0.0000 GB (24 %)" in lines[0]
    assert folders[0] == folders[1]
    assert bucket.num_bytes == sum(map(len, FILES.values())), "only one thread downloaded"
