"""Prompts that share 300 tokens find almost all of these, also where a hit ends at a checkpoint."""

import pytest

from benchmarks.cache.hit_rate import KINDS, hit_rate


@pytest.mark.parametrize("kind", KINDS)
def test_later_requests_find_the_shared_prompt(kind: str) -> None:
    """Its 18 full blocks: all but the first request find them, or all but the first two, which make the checkpoint."""
    num_misses = 1 if kind == "full" else 2
    assert hit_rate(kind, 40, at_once=False) == pytest.approx((40 - num_misses) * 288 / (40 * 300))
