"""Arrival times: as many a second as asked for, distributed as vLLM distributes them."""

import numpy as np
import pytest

from proa_cli.bench.arrivals import Burstiness, RampUp, arrival_times

POISSON, EVEN = Burstiness(), Burstiness(float("inf"))


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def test_without_a_rate_all_requests_are_sent_at_the_start() -> None:
    assert arrival_times(3, None, POISSON, draw()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0, float("inf")])
def test_the_last_request_is_sent_when_the_rate_says_so(burstiness: float) -> None:
    times = arrival_times(50, 4.0, Burstiness(burstiness), draw())
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == pytest.approx(50 / 4.0)


def test_infinite_burstiness_is_even() -> None:
    assert arrival_times(4, 2.0, EVEN, draw()) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_gaps_vary_as_the_gamma_distribution_of_this_shape(burstiness: float, variation: float) -> None:
    gaps = np.diff(arrival_times(20_000, 10.0, Burstiness(burstiness), draw()))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)  # 1 / sqrt(shape)


def test_the_same_seed_gives_the_same_times() -> None:
    assert arrival_times(9, 1.0, POISSON, draw()) == arrival_times(9, 1.0, POISSON, draw())


def test_a_linear_ramp_shortens_the_gaps_from_one_rate_to_the_other() -> None:
    times = arrival_times(3, None, EVEN, draw(), RampUp("linear", 1.0, 4.0))
    assert np.diff([0.0, *times]) == pytest.approx([1.0, 1 / 2.5, 0.25])


def test_an_exponential_ramp_multiplies_the_rate() -> None:
    assert RampUp("exponential", 1.0, 16.0).rates(3) == pytest.approx([1.0, 4.0, 16.0])


def test_a_ramp_from_zero_begins_with_its_second_rate() -> None:
    times = arrival_times(3, None, EVEN, draw(), RampUp("linear", 0.0, 4.0))
    assert np.diff([0.0, *times]) == pytest.approx([0.5, 0.5, 0.25])


def test_one_request_has_a_time_with_any_ramp() -> None:
    assert np.isfinite(arrival_times(1, None, EVEN, draw(), RampUp("linear", 0.0, 4.0))).all()


@pytest.mark.parametrize(("start", "end"), [(2.0, 1.0), (0.0, 0.0), (-1.0, 2.0)])
def test_a_ramp_that_does_not_rise_is_refused(start: float, end: float) -> None:
    with pytest.raises(ValueError, match="ramp-up-end-rps"):
        RampUp("linear", start, end)


def test_an_exponential_ramp_from_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="exponential"):
        RampUp("exponential", 0.0, 2.0)
