"""The file of a rank's arena: who may open it, and when it is emptied."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from proa_engine.memory.arena_memory import anonymous_memory, existing_bytes, open_file
from proa_engine.mover.arena import Arena
from proa_engine.mover.layout import ArenaLayout

LAYOUT = ArenaLayout(num_pages=8, page_bytes=4096, has_directory=True)


def test_the_file_is_only_for_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    open_file(folder, 3, LAYOUT, b"same").close()
    path = folder / "rank-3.arena"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == LAYOUT.num_bytes


def test_a_file_of_the_same_configuration_is_adopted_without_its_serials(tmp_path: Path) -> None:
    first = open_file(tmp_path, 0, LAYOUT, b"same")
    assert (first.is_adopted, first.epoch) == (False, 1)
    arena = Arena(first.descriptor, LAYOUT)
    arena._serials[5] = 77
    arena.buffers(5)[0][:3] = b"abc"
    first.close()
    second = open_file(tmp_path, 0, LAYOUT, b"same", lock_seconds=0)
    assert (second.is_adopted, second.since, second.epoch) == (True, first.since, 1)
    arena = Arena(second.descriptor, LAYOUT)
    assert (arena.serial(5), bytes(arena.buffers(5)[0][:3])) == (0, b"abc")
    second.close()


@pytest.mark.parametrize(
    ("layout", "fingerprint"), [(LAYOUT, b"other"), (replace(LAYOUT, num_pages=9), b"same")], ids=["weights", "size"]
)
def test_a_file_of_another_configuration_is_emptied(tmp_path: Path, layout: ArenaLayout, fingerprint: bytes) -> None:
    first = open_file(tmp_path, 0, LAYOUT, b"same")
    Arena(first.descriptor, LAYOUT).buffers(5)[0][:3] = b"abc"
    first.close()
    second = open_file(tmp_path, 0, layout, fingerprint, lock_seconds=0)
    assert not second.is_adopted
    assert second.since > first.since
    assert bytes(Arena(second.descriptor, layout).buffers(5)[0][:3]) == bytes(3)
    second.close()


def test_a_file_without_a_header_is_emptied(tmp_path: Path) -> None:
    """Its engine was killed before it wrote one."""
    (tmp_path / "rank-0.arena").write_bytes(bytes(LAYOUT.num_bytes))
    memory = open_file(tmp_path, 0, LAYOUT, b"same")
    assert not memory.is_adopted
    memory.close()


def test_a_second_engine_is_refused_in_a_sentence(tmp_path: Path) -> None:
    first = open_file(tmp_path, 0, LAYOUT, b"same")
    with pytest.raises(ValueError, match=r"kv_offloading_path: .*rank-0.arena is in use by another engine: give each"):
        open_file(tmp_path, 0, LAYOUT, b"same", lock_seconds=0.2)
    other_rank = open_file(tmp_path, 1, LAYOUT, b"same")
    other_rank.close()
    first.close()
    open_file(tmp_path, 0, LAYOUT, b"same", lock_seconds=0).close()


def test_a_folder_without_room_is_refused_in_a_sentence(tmp_path: Path) -> None:
    large = replace(LAYOUT, page_bytes=1 << 45)
    with pytest.raises(ValueError, match=r"kv_offloading_path: .* has no room for .* GiB .*: lower kv_off"):
        open_file(tmp_path, 0, large, b"same")
    assert (tmp_path / "rank-0.arena").stat().st_size == 0


def test_a_folder_that_cannot_be_made_or_a_link_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="kv_offloading_path: cannot open"):
        open_file(tmp_path / "file", 0, LAYOUT, b"same")
    (tmp_path / "rank-0.arena").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="kv_offloading_path: cannot open"):
        open_file(tmp_path, 0, LAYOUT, b"same")


def test_the_memory_of_all_ranks_is_counted(tmp_path: Path) -> None:
    assert existing_bytes(tmp_path / "missing") == 0
    for rank in (0, 1):
        open_file(tmp_path, rank, LAYOUT, b"same").close()
    assert existing_bytes(tmp_path) >= 2 * LAYOUT.num_bytes


def test_anonymous_memory_has_no_file() -> None:
    layout = replace(LAYOUT, has_directory=False)
    memory = anonymous_memory(layout)
    assert Arena(memory.descriptor, layout).serial(7) == 0
    memory.close()
