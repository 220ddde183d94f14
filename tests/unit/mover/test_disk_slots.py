"""Which folder an engine's disk cache is in."""

import os
from pathlib import Path

import pytest

from proa_engine.mover.disk_slots import delete_abandoned, lock_folder, take_slot
from proa_engine.mover.throttle import Throttle

FINGERPRINT = bytes(range(32))
WEEK = 7 * 86400.0


def test_engines_of_one_volume_have_different_slots_and_a_new_one_adopts_a_free_one(tmp_path: Path) -> None:
    first, lock = take_slot(tmp_path, FINGERPRINT)
    second, other = take_slot(tmp_path, FINGERPRINT)
    assert (first.name, second.name) == ("0", "1")
    assert first.parent.name == FINGERPRINT[:16].hex()
    os.close(lock)
    third, lock = take_slot(tmp_path, FINGERPRINT)
    assert third == first
    os.close(lock)
    os.close(other)


def test_engines_of_other_models_have_other_folders(tmp_path: Path) -> None:
    ours, lock = take_slot(tmp_path, FINGERPRINT)
    theirs, other = take_slot(tmp_path, FINGERPRINT[::-1])
    assert ours.name == theirs.name == "0"
    assert ours.parent != theirs.parent
    os.close(lock)
    os.close(other)


def test_a_lock_lasts_as_long_as_any_process_has_its_descriptor(tmp_path: Path) -> None:
    descriptor = lock_folder(tmp_path)
    assert descriptor is not None
    of_child = os.dup(descriptor)
    os.close(descriptor)
    assert lock_folder(tmp_path) is None
    os.close(of_child)
    descriptor = lock_folder(tmp_path)
    assert descriptor is not None
    os.close(descriptor)


def test_a_path_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        take_slot(tmp_path / "file", FINGERPRINT)


def test_slots_that_no_engine_uses_are_deleted_after_a_week(tmp_path: Path) -> None:
    old, lock = take_slot(tmp_path, FINGERPRINT)
    (old / "rank-0").mkdir()
    (old / "rank-0" / "00000000.data").write_bytes(b"data")
    foreign = tmp_path / "models" / "0"
    foreign.mkdir(parents=True)
    (foreign / "lock").write_text("not ours")
    later = (old / "lock").stat().st_mtime + WEEK + 100
    assert delete_abandoned(tmp_path, later) == [], "an engine has it"
    os.close(lock)
    assert delete_abandoned(tmp_path, later - 200) == []
    assert delete_abandoned(tmp_path, later) == [old]
    assert not old.exists()
    assert (foreign / "lock").exists()


def test_slots_that_must_not_be_deleted_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, lock = take_slot(tmp_path, FINGERPRINT)
    os.close(lock)

    def refuse(folder: Path) -> None:
        raise PermissionError(f"{folder} is another user's")

    monkeypatch.setattr("proa_engine.mover.disk_slots.shutil.rmtree", refuse)
    assert delete_abandoned(tmp_path, (old / "lock").stat().st_mtime + WEEK + 100) == []
    assert old.exists()


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("size", [10, 1000, 5000])
def test_a_throttle_allows_no_more_bytes_than_its_rate(size: int) -> None:
    time = FakeTime()
    throttle = Throttle(1000.0, clock=time.clock, sleep=time.sleep)
    for _ in range(100):
        throttle.wait(size)
    assert time.now - 100.0 == pytest.approx((100 * size - size) / 1000.0, abs=0.2)
    time.now += 3600.0
    began = time.now
    for _ in range(100):
        throttle.wait(size)
    assert time.now - began == pytest.approx((100 * size - size) / 1000.0, abs=0.2), "an idle hour is not made up for"
