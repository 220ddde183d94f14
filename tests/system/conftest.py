"""Time limits of tests that start processes: each imports torch, which takes long where all cores are taken."""

from pathlib import Path

import pytest

SECONDS = 400  # ends a test that hangs; the longest take a fourth of it on two quiet cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with a limit of their own keep it. The hook sees the tests of other folders too."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))
