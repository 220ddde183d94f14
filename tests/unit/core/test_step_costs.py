"""What a step should take grows with its tokens, and with its tokens times those before them."""

import pytest

from proa_engine.core.request import Request
from proa_engine.core.timing.step_costs import CONTEXT_ROW_TOKENS, RowSizes, StepCosts, StepRows
from support.core import make_request

COSTS = StepCosts(step=0.01, token=0.001, pair=1e-6, images=2.0)


def request_at(num_computed_tokens: int) -> Request:
    request = Request(make_request(), order=(0, 0), max_num_tokens=100, eos_token_ids=frozenset())
    request.num_computed_tokens = num_computed_tokens
    return request


def seconds(*rows: tuple[int, int], encodes: bool = False) -> float:
    """Of one step with rows of (tokens, tokens with those before them), those of one token first."""
    sizes = RowSizes(chunks=[size for size, _ in rows if size > 1])
    return COSTS.seconds([StepRows([request_at(end) for _, end in rows], sizes, encodes)])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1, 0)], 0.01),  # reads every weight
        ([(256, 0)], 0.256),
        ([(256, 40_000)], 0.256 + 256 * 40_000e-6),
        ([(512, 1_000_000)], 0.512 + 512.0),
        ([(1, 40_000)], 0.01 + CONTEXT_ROW_TOKENS * 40_000e-6),  # reads all keys and values too
        ([(1, 1000), (100, 2000)], 0.101 + CONTEXT_ROW_TOKENS * 1e-3 + 100 * 2e-3),
    ],
)
def test_a_step_takes_what_its_tokens_and_their_contexts_take(rows: list[tuple[int, int]], expected: float) -> None:
    assert seconds(*rows) == pytest.approx(expected)


def test_images_and_steps_in_flight_add_up() -> None:
    assert seconds((2, 0), encodes=True) == pytest.approx(2.01)
    step = StepRows([request_at(0)], RowSizes(), False)
    assert COSTS.seconds([step, step]) == pytest.approx(0.02)
    assert COSTS.seconds([]) == 0.0


def test_stages_multiply_and_adapters_take_the_higher() -> None:
    assert COSTS.of_stages(3).pair == pytest.approx(3e-6)
    assert COSTS.longest_of(StepCosts(step=1.0)) == StepCosts(step=1.0, token=0.001, pair=1e-6, images=2.0)
