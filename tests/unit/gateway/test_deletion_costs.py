"""Deletion costs of pods follow the use of their engines' caches."""

from proa_gateway.engines.deletion_costs import NUM_PERIODS, CacheUse


def sampled(**totals: int) -> CacheUse:
    """An hour of samples without use."""
    use = CacheUse()
    for _ in range(NUM_PERIODS + 1):
        costs = use.sample(totals)
    assert costs == dict.fromkeys(totals, 0)
    return use


def test_the_cost_is_the_size_of_what_was_found_in_the_last_periods() -> None:
    use = sampled(a=10**9, b=0)
    for _ in range(NUM_PERIODS):
        assert use.sample({"a": 10**9 + 1000, "b": 3}) == {"a": 10, "b": 2}
    assert use.sample({"a": 10**9 + 1000, "b": 3}) == {"a": 0, "b": 0}


def test_an_engine_has_a_cost_once_it_was_sampled_for_all_periods() -> None:
    use = sampled(a=0)
    for number in range(NUM_PERIODS):
        assert use.sample({"a": 0, "b": number}) == {"a": 0}
    assert use.sample({"a": 0, "b": NUM_PERIODS}) == {"a": 0, "b": NUM_PERIODS.bit_length()}


def test_a_restarted_engine_counts_from_zero() -> None:
    assert sampled(a=5000).sample({"a": 300}) == {"a": 9}


def test_an_engine_that_is_gone_is_forgotten() -> None:
    use = sampled(a=0, b=0)
    assert use.sample({"b": 7}) == {"b": 3}
    assert use.sample({"a": 100, "b": 7}) == {"b": 3}
