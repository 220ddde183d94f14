"""The cost of reading a JSON body is known before it is read."""

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa_gateway.http import bodies as json_body
from proa_gateway.http.bodies import cost_bound, costs_too_much

MIB = 2**20
CHEAP = {
    "a text": json.dumps("a, [b]: {c}" * 100_000),
    "a text with quotes": json.dumps('"a", "b": ' * 50_000),
    "a text that ends with backslashes": json.dumps(["\\" * 100_001, "[" * 100_000]),
    "a program in a string": json.dumps({"messages": [{"content": json.dumps([{"a": ""}] * 50_000)}]}),
    "the ids of a long prompt": json.dumps(list(range(650_000))),
    "a text without an end": '"' + "[" * 1_000_000,
    "white space": " " * MIB,
}
DEAR = {
    "numbers": json.dumps([1] * 1_100_000),
    "lists": json.dumps([[]] * 300_000),
    "objects": json.dumps([{}] * 300_000),
    "fields": json.dumps({str(each): 1 for each in range(200_000)}),
    "nesting": "[" * 400_000,
    "between texts": json.dumps(["[", "]"] * 600_000),
}


@pytest.mark.parametrize("name", CHEAP)
def test_what_stands_in_a_text_costs_nothing(name: str) -> None:
    assert not costs_too_much(CHEAP[name].encode())


@pytest.mark.parametrize("name", DEAR)
def test_many_values_cost_too_much(name: str) -> None:
    assert cost_bound(DEAR[name].encode()) > json_body.MAX_COST
    assert costs_too_much(DEAR[name].encode())


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.text() | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def cost_of(value: Any) -> int:
    """From the parsed value."""
    if isinstance(value, dict):
        return 30 + (12 + 4) * len(value) + max(len(value) - 1, 0) + sum(map(cost_of, value.values()))
    if isinstance(value, list):
        return 12 + max(len(value) - 1, 0) + sum(map(cost_of, value))
    return 4 if isinstance(value, str) else 0


@given(VALUES, st.integers(-1, 1))
def test_the_cost_is_that_of_the_values(value: Any, margin: int) -> None:
    body, cost = json.dumps(value, ensure_ascii=bool(margin)).encode(), cost_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "MAX_COST", cost + margin)
        assert costs_too_much(body) is (margin < 0)


def test_the_bound_of_the_parts_is_not_below_the_cost() -> None:
    body = json.dumps([{"a": [1, 2, '"'], "b": {}}] * 50).encode()
    cuts = [0, *sorted(random.Random(0).sample(range(len(body)), 9)), len(body)]
    parts = [body[start:end] for start, end in itertools.pairwise(cuts)]
    assert sum(map(cost_bound, parts)) >= cost_of(json.loads(body))
