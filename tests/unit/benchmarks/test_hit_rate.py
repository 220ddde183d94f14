"""Prompts that share 300 tokens find almost all of these, also where a hit ends at a checkpoint."""

import pytest

from benchmarks.cache.hit_rate import KINDS, hit_rate

FULL_BLOCKS = 288  # tokens of the shared ones


@pytest.mark.parametrize("name", KINDS)
def test_later_requests_find_the_shared_prompt(name: str) -> None:
    """All but the first request find its full blocks, or all but the first two, which make the checkpoint. With small
    states the second one finds a checkpoint of the interval."""
    of_second = {"full": FULL_BLOCKS, "lfm2": 256}.get(name, 0)
    assert hit_rate(KINDS[name], 40, at_once=False) == pytest.approx((38 * FULL_BLOCKS + of_second) / (40 * 300))
