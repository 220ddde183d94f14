"""What hostile and large images cost a process in memory and processor time."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.hostile_images import ACCEPTED, LARGEST, REFUSED

MEGABYTE = 1_000_000
PIXELS = 49_000_000
TESTS = Path(__file__).parents[1]


def measured(*files: Path) -> list[tuple[float, int]]:
    """Of each file in turn, in one process: seconds of processor time, and the peak of bytes above those before."""
    command = [sys.executable, "-W", "ignore", "-m", "support.image_cost", *map(str, files)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=TESTS)
    assert result.returncode == 0, result.stderr
    return [(float(seconds), int(size)) for seconds, size in map(str.split, result.stdout.splitlines())]


def test_hostile_files_cost_no_more_than_a_few_times_their_size(tmp_path: Path) -> None:
    files = []
    for index, make in enumerate([*REFUSED.values(), *ACCEPTED.values()]):
        files.append(tmp_path / str(index))
        files[-1].write_bytes(make())
    for seconds, size in measured(*files):
        assert seconds < 2
        assert size < 64 * MEGABYTE


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_images_cost_a_bounded_number_of_bytes_for_each_pixel(name: str, tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(LARGEST[name]())
    ((seconds, size),) = measured(file)
    assert seconds < 10  # 2 s on the machine of docs/images.md
    assert size < (21 if name.startswith("WebP") else 12) * PIXELS
