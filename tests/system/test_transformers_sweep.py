"""Every causal language model type of `transformers` has the outcome that docs/models.md publishes (`make sweep`)."""

import pytest

from support.transformers_sweep import judge, read_page
from support.transformers_types import model_types


@pytest.mark.parametrize("model_type", model_types())
def test_outcome_is_the_published_one(model_type: str) -> None:
    assert judge(model_type).text == read_page()[model_type]
