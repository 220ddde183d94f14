"""The score of late interaction."""

import pytest

from proa_gateway.pooling.scorers import max_sim
from proa_gateway.pooling.values import TURN_VALUES


async def test_the_closest_rows_count_in_documents_of_any_length() -> None:
    query = [[1.0, 0.0], [0.0, 1.0]]
    far = [[-1.0, -2.0]] * TURN_VALUES
    assert await max_sim(query, [[0.5, 0.25]]) == 0.75
    assert await max_sim(query, [*far, [0.5, 0.0], *far, [0.0, 0.25]]) == pytest.approx(0.75)
    assert await max_sim(query, far) == pytest.approx(-3.0)
