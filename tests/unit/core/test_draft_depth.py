"""The number of draft tokens is the one that gives the most tokens a second, whatever load and text do."""

from collections.abc import Callable

import pytest

from proa_engine.core.timing.draft_depth import MeasuredDepth, ScheduledDepth
from proa_engine.core.timing.step_costs import RowSizes
from support.core import CoreRun, make_request

MAX_DRAFTS = 3


class Steps:
    """Steps of `num_rows` rows. `seconds(drafts)` is the time of one, and `shares` [places] are accepted, of rows."""

    def __init__(self, num_rows: int, seconds: Callable[[int], float], shares: tuple[float, ...]) -> None:
        self.num_rows, self.seconds, self.shares = num_rows, seconds, shares

    def run(self, depth: MeasuredDepth, count: int) -> list[int]:
        """Return the number of draft tokens of each."""
        numbers = []
        for _ in range(count):
            num_drafts = depth.num_drafts
            numbers.append(num_drafts)
            sizes = RowSizes(drafted=[1 + num_drafts] * self.num_rows if num_drafts else [])
            accepted = [round(share * self.num_rows) for share in self.shares[:num_drafts]]
            depth.add(self.num_rows, sizes, accepted, self.seconds(num_drafts))
        return numbers


def most_used(numbers: list[int]) -> int:
    return max(set(numbers), key=numbers.count)


FREE = Steps(1, lambda num_drafts: 1.0, (0.9, 0.8, 0.7))  # of one row: reading the weights takes all the time
COSTLY = Steps(100, lambda num_drafts: 1.0 + num_drafts, (0.9, 0.8, 0.7))  # of many: a token costs as much as a row
WRONG = Steps(10, lambda num_drafts: 1.0 + 0.05 * num_drafts, (0.0, 0.0, 0.0))
SHORT = Steps(10, lambda num_drafts: 1.0 + 0.1 * num_drafts, (0.8, 0.02, 0.01))


@pytest.mark.parametrize(("steps", "best"), [(FREE, 3), (COSTLY, 0), (WRONG, 0), (SHORT, 1)])
def test_the_number_with_the_most_tokens_a_second_is_used(steps: Steps, best: int) -> None:
    depth = MeasuredDepth(MAX_DRAFTS)
    assert set(steps.run(depth, 12)) == {0, 1, 2, 3}  # each is tried first
    numbers = steps.run(depth, 1000)
    assert most_used(numbers) == best
    assert numbers.count(best) >= 990


def test_each_number_of_rows_has_its_own_times() -> None:
    depth = MeasuredDepth(MAX_DRAFTS)
    for _ in range(2):
        assert most_used(FREE.run(depth, 100)) == 3
        assert most_used(COSTLY.run(depth, 100)) == 0


def test_a_text_that_drafts_fit_better_is_noticed() -> None:
    depth = MeasuredDepth(MAX_DRAFTS)
    WRONG.run(depth, 200)
    better = Steps(WRONG.num_rows, WRONG.seconds, (0.9, 0.9, 0.9))
    assert most_used(better.run(depth, 20_000)[-1000:]) == 3


def test_steps_that_computed_prompts_and_clocks_that_were_set_back_count_nothing() -> None:
    depth = MeasuredDepth(MAX_DRAFTS)
    for seconds, drafted, chunks in ((1.0, [4], [200]), (1.0, [], [2]), (-1.0, [4], []), (0.0, [], [])):
        depth.add(2, RowSizes(drafted, chunks), [2, 1, 1], seconds)
    assert FREE.run(depth, 3) == [3, 3, 3]


def test_a_schedule_goes_by_the_rows_of_the_step_before() -> None:
    depth = ScheduledDepth([(1, 3), (32, 2), (256, 0)])
    numbers = []
    for num_rows in (1, 31, 32, 255, 256, 4000):
        depth.add(num_rows, RowSizes(), (), 1.0)
        numbers.append(depth.num_drafts)
    assert numbers == [3, 3, 2, 2, 0, 0]


class TokenClock:
    """Each call is later by the tokens of the last step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.run: CoreRun | None = None

    def __call__(self) -> float:
        batches = self.run.batches() if self.run else []
        self.now += sum(batches[-1].values()) if batches else 1.0
        return self.now


def test_an_engine_stops_drafting_where_drafts_are_never_accepted() -> None:
    clock = TokenClock()
    run = CoreRun(num_speculative_tokens=MAX_DRAFTS, measures_drafts=True, accept=lambda num_drafts: 0, clock=clock)
    clock.run = run
    request = make_request("a", [1, 2], max_tokens=100)
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert run.core.counters().drafts.depth == 0
    assert [sum(batch.values()) for batch in run.batches()][-20:] == [1] * 20
