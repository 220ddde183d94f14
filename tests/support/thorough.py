"""How many cases tests try: few in `make test`, more in `make test-all`, which sets PROA_THOROUGH_TESTS."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

THOROUGH = bool(os.environ.get("PROA_THOROUGH_TESTS"))


def seeds(usual: int, thorough: int) -> range:
    """Seeds of random cases."""
    return range(thorough if THOROUGH else usual)


def combinations(first: Sequence[Any], *others: Sequence[Any]) -> Iterable[tuple[Any, ...]]:
    """All combinations if tests are thorough; otherwise one for each of `first`, the longest, with all combinations of
    `others` in turn."""
    if THOROUGH:
        return itertools.product(first, *others)
    return ((one, *rest) for one, rest in zip(first, itertools.cycle(itertools.product(*others)), strict=False))
