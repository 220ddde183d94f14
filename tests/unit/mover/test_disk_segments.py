"""Segments on disk: what is found after writes, restarts, torn and damaged files, and when there is no room."""

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from proa_engine.mover.disk_records import CheckpointRecord
from proa_engine.mover.disk_segments import Damaged, Segments
from proa_engine.mover.index import STATE, Key
from support.movers import hashes

UNIT = 1000  # bytes


class Volume:
    """A folder that has room for `num_free` bytes."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free

    def write(self, descriptor: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        if not self.num_free:
            raise OSError(errno.ENOSPC, "no space left on device")
        count = os.pwritev(descriptor, [memoryview(buffers[0])[: self.num_free]], offset)
        self.num_free -= count
        return count


def opened(folder: Path, *, max_bytes: int = 100 * UNIT, segment_bytes: int = 4 * UNIT) -> Segments:
    return Segments(folder, max_bytes=max_bytes, segment_bytes=segment_bytes)


def copied(folder: Path, name: str) -> Path:
    """What another process would adopt if this one were killed now."""
    return shutil.copytree(folder, folder.parent / f"{folder.name}-{name}")


def content(key: Key) -> bytes:
    table, block_hash = key
    return ((block_hash + bytes([table + 1])) * UNIT)[:UNIT]


def write(segments: Segments, *keys: Key) -> None:
    for key in keys:
        unit = content(key)
        segments.add(key, segments.append([unit[:300], unit[300:]], xxh3_64_intdigest(unit)))


def blocks(count: int, salt: int = 0) -> list[Key]:
    return [(0, block_hash) for block_hash in hashes(count, salt)]


def found(segments: Segments, keys: Sequence[Key]) -> list[Key]:
    """Which of these are found, with the right content."""
    whole = []
    for key in keys:
        place = segments.find(key)
        if place is not None:
            assert bytes(segments.read(key, place)) == content(key)
            whole.append(key)
    return whole


def stored(segments: Segments) -> set[bytes]:
    """The hashes of the blocks, as the changes since the start tell."""
    changes, _ = segments.take_changes()
    assert changes.is_snapshot
    return set(changes.stored)


def test_units_are_found_with_their_content_and_after_a_restart(tmp_path: Path) -> None:
    segments, keys = opened(tmp_path), blocks(10)
    write(segments, *keys)
    assert found(segments, keys) == keys
    again = opened(tmp_path)  # the first one was not closed: its process was killed
    assert found(again, keys) == keys
    assert stored(segments) == stored(again) == {block_hash for _, block_hash in keys}
    assert again.num_bytes == segments.num_bytes


def test_an_adopted_folder_is_written_on(tmp_path: Path) -> None:
    keys = blocks(6)
    write(opened(tmp_path), *keys[:3])
    again = opened(tmp_path)
    write(again, *keys[3:])
    assert found(opened(tmp_path), keys) == keys


def test_files_can_be_read_by_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "rank-0"
    write(opened(folder), *blocks(1))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_unit_that_was_not_added_is_not_found(tmp_path: Path) -> None:
    """As one that changed while it was written."""
    segments, (first, second) = opened(tmp_path), blocks(2)
    segments.append([b"x" * UNIT], 5)
    write(segments, second)
    for each in (segments, opened(tmp_path)):
        assert found(each, [first, second]) == [second]


def test_a_torn_index_keeps_the_records_before(tmp_path: Path) -> None:
    keys = blocks(3)
    write(opened(tmp_path), *keys)
    index, data = tmp_path / "00000000.index", tmp_path / "00000000.data"
    records, units = index.read_bytes(), data.read_bytes()
    counts = []
    for length in range(len(records) + 1):
        index.write_bytes(records[:length])
        data.write_bytes(units)  # a segment without records was deleted
        counts.append(len(found(opened(tmp_path), keys)))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3}


def test_torn_data_keep_the_units_before(tmp_path: Path) -> None:
    keys = blocks(3)
    write(opened(tmp_path), *keys)
    index, data = tmp_path / "00000000.index", tmp_path / "00000000.data"
    records, units = index.read_bytes(), data.read_bytes()
    for length in (0, 1, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT, 3 * UNIT - 1, 3 * UNIT):
        index.write_bytes(records)
        data.write_bytes(units[:length])
        assert len(found(opened(tmp_path), keys)) == length // UNIT


def test_a_flipped_bit_of_the_index_hides_what_follows(tmp_path: Path) -> None:
    keys = blocks(3)
    write(opened(tmp_path), *keys)
    index, data = tmp_path / "00000000.index", tmp_path / "00000000.data"
    records, units = index.read_bytes(), data.read_bytes()
    for place in range(len(records)):
        flipped = bytearray(records)
        flipped[place] ^= 1 << place % 8
        index.write_bytes(flipped)
        data.write_bytes(units)
        whole = found(opened(tmp_path), keys)
        assert whole == keys[: len(whole)]
        assert len(whole) < 3


def test_a_damaged_unit_is_not_returned_and_not_found_again(tmp_path: Path) -> None:
    segments, keys = opened(tmp_path), blocks(3)
    write(segments, *keys)
    data = tmp_path / "00000000.data"
    flipped = bytearray(data.read_bytes())
    flipped[UNIT + 7] ^= 1
    data.write_bytes(flipped)
    segments.take_changes()
    place = segments.find(keys[1])
    assert place is not None
    with pytest.raises(Damaged):
        segments.read(keys[1], place)
    assert found(segments, keys) == [keys[0], keys[2]]
    assert list(segments.take_changes()[0].removed) == [keys[1][1]]
    write(segments, keys[1])
    assert found(opened(tmp_path), keys) == keys, "the last record of a unit counts"


def test_files_of_another_kind_are_left_and_incomplete_segments_deleted(tmp_path: Path) -> None:
    write(opened(tmp_path), *blocks(1))
    for name in ("notes.txt", "00000007.data", "00000008.index"):
        (tmp_path / name).write_bytes(b"anything")
    segments = opened(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "00000000.data", "00000000.index"}
    write(segments, *blocks(1, salt=1))
    assert (tmp_path / "00000009.data").exists()


def make_room(segments: Segments) -> None:
    """What a writer does before each unit."""
    while segments.is_at_end(UNIT) and segments.must_make_room:
        kept = segments.make_room()
        for key, unit, checksum in kept.units:
            segments.add(key, segments.append([unit], checksum))
        for record in kept.checkpoints:
            segments.add_checkpoint(record)


def test_the_oldest_segment_is_deleted_when_there_is_no_room(tmp_path: Path) -> None:
    segments, keys = opened(tmp_path, max_bytes=13 * UNIT), blocks(40)
    for key in keys:
        make_room(segments)
        write(segments, key)
        assert segments.num_bytes <= 13 * UNIT
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == segments.num_bytes
    assert found(segments, keys) == keys[-12:]
    assert stored(segments) == {block_hash for _, block_hash in keys[-12:]}


def test_units_that_are_read_outlive_their_segment(tmp_path: Path) -> None:
    segments, keys = opened(tmp_path, max_bytes=13 * UNIT), blocks(60)
    for key in keys:
        make_room(segments)
        write(segments, key)
        assert found(segments, keys[:2]) == keys[: min(2, keys.index(key) + 1)]
    assert len(found(opened(tmp_path), keys)) >= 8


def test_a_segment_whose_file_was_deleted_makes_room(tmp_path: Path) -> None:
    segments, keys = opened(tmp_path, max_bytes=13 * UNIT), blocks(40)
    for key in keys[:4]:
        write(segments, key)
    assert found(segments, keys[:1]) == keys[:1]
    (tmp_path / "00000000.data").unlink()
    for key in keys[4:]:
        make_room(segments)
        write(segments, key)
    assert found(segments, keys) == keys[-12:]


def test_a_segment_of_units_that_are_all_read_loses_half_of_them(tmp_path: Path) -> None:
    segments, keys = opened(tmp_path, max_bytes=13 * UNIT), blocks(40)
    for count, key in enumerate(keys, start=1):
        make_room(segments)
        write(segments, key)
        found(segments, keys[:count])
    assert segments.num_bytes <= 13 * UNIT
    assert keys[-1] in found(segments, keys)


CHECKPOINT = CheckpointRecord(hashes(3)[2], ((hashes(3)[1], hashes(3)[2]), (hashes(3)[2],)), has_state=True)
UNITS: list[Key] = [(1, hashes(3)[1]), (1, hashes(3)[2]), (2, hashes(3)[2]), (STATE, hashes(3)[2])]


def test_a_checkpoint_is_found_with_all_its_units_or_not_at_all(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    write(segments, *UNITS[:3])
    assert not segments.add_checkpoint(CHECKPOINT)
    write(segments, UNITS[3])
    assert segments.add_checkpoint(CHECKPOINT)
    again = opened(tmp_path)
    for each in (segments, again):
        checkpoint = each.find_checkpoint(CHECKPOINT.block_hash)
        assert checkpoint is not None
        assert found(each, checkpoint.keys) == UNITS
        assert list(each.take_changes()[1].stored) == [CHECKPOINT.block_hash]
    place = again.find(UNITS[1])
    assert place is not None
    os.truncate(tmp_path / "00000000.data", UNIT)
    with pytest.raises(Damaged):
        again.read(UNITS[1], place)
    assert again.find_checkpoint(CHECKPOINT.block_hash) is None
    assert list(again.take_changes()[1].removed) == [CHECKPOINT.block_hash]


def test_a_checkpoint_that_is_read_outlives_its_segments(tmp_path: Path) -> None:
    segments = opened(tmp_path, max_bytes=25 * UNIT, segment_bytes=8 * UNIT)
    write(segments, *UNITS)
    assert segments.add_checkpoint(CHECKPOINT)
    for key in blocks(60, salt=1):
        make_room(segments)
        write(segments, key)
        checkpoint = segments.find_checkpoint(CHECKPOINT.block_hash)
        assert checkpoint is not None
        assert found(segments, checkpoint.keys) == UNITS
    assert opened(tmp_path).find_checkpoint(CHECKPOINT.block_hash) is not None


@pytest.mark.parametrize("num_free", [*range(0, UNIT, 250), UNIT - 1, UNIT, UNIT + 5, 2 * UNIT + 100])
def test_a_full_volume_loses_nothing_that_was_added(tmp_path: Path, num_free: int) -> None:
    volume, keys = Volume(num_free), blocks(4)
    segments = Segments(tmp_path, max_bytes=100 * UNIT, segment_bytes=4 * UNIT, write=volume.write)
    added = []
    for key in keys:
        with suppress(OSError):
            write(segments, key)
            added.append(key)
    assert found(segments, keys) == found(opened(copied(tmp_path, "full")), keys) == added
    volume.num_free = 10 * UNIT
    write(segments, *keys)
    assert found(segments, keys) == found(opened(copied(tmp_path, "room")), keys) == keys


def test_nothing_is_found_or_adopted_after_a_reset(tmp_path: Path) -> None:
    segments, keys = opened(tmp_path), blocks(6)
    write(segments, *keys[:3])
    segments.append([content(keys[3])], 0)
    segments.reset()
    assert found(segments, keys) == []
    place = segments.append([content(keys[3])], xxh3_64_intdigest(content(keys[3])))
    segments.add(keys[3], place)  # began before the reset
    assert found(segments, keys) == []
    segments.clear()
    assert segments.num_bytes == 0
    write(segments, keys[4])
    assert found(segments, keys) == [keys[4]], "of the new weights"
    assert stored(segments) == {keys[4][1]}
    assert found(opened(tmp_path), keys) == [], "the folder's name tells the old weights"
    assert list(tmp_path.iterdir()) == []
