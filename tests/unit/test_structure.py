"""Code stays small to a reader. A limit that is reached is lowered; none is raised."""

import re
from pathlib import Path

from support.structure import count_none_tests, files_of, large_classes, largest_folder, late_constants, stray_texts

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine" / "proa_engine"
PRODUCT = [ROOT / "engine", ROOT / "protos", ROOT / "services"]


def test_folders_have_few_files() -> None:
    num_files, folder = max(map(largest_folder, PRODUCT))
    assert num_files <= 25, folder


def test_no_class_has_more_than_25_methods() -> None:
    names = list(large_classes(files_of(*PRODUCT), more_than=25))
    assert names == []


def test_the_engine_seldom_asks_whether_something_is_none() -> None:
    assert count_none_tests(files_of(ENGINE)) <= 847


def test_no_constant_stands_below_the_first_class_or_function() -> None:
    found = list(late_constants(files_of(*PRODUCT)))
    assert found == []


def test_no_text_documents_a_constant_that_stands_elsewhere() -> None:
    found = list(stray_texts(files_of(*PRODUCT)))
    assert found == []


def test_the_readme_says_how_many_lines_there_are() -> None:
    said = re.search(r"about ([0-9,]+) lines of Python", (ROOT / "README.md").read_text())
    assert said is not None
    num_lines = sum(path.read_text().count("\n") for path in files_of(*PRODUCT))
    assert abs(int(said[1].replace(",", "")) / num_lines - 1) < 0.03, num_lines
