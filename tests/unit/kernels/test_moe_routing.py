"""How experts are chosen: groups, and scores that count for the choice alone."""

from typing import Literal

import pytest
import torch

from proa_engine.kernels.experts.moe_route import Routing, route


def test_normalized_softmax_weights_are_those_of_the_chosen_logits() -> None:
    logits = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)) * 3
    weights, experts = route(logits, Routing(4, normalize=True))
    torch.testing.assert_close(weights, logits.gather(1, experts.long()).softmax(-1))


def test_a_correction_changes_the_choice_but_not_the_weights() -> None:
    logits, correction = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([9.0, 0.0, 0.0, 0.0])
    weights, experts = route(logits, Routing(2, normalize=False, scoring="sigmoid", scale=2.0), correction)
    assert experts.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, 2 * logits[:, [0, 3]].sigmoid())


@pytest.mark.parametrize(("best", "chosen"), [(1, [0, 1]), (2, [2, 3])])
def test_a_groups_score_is_the_sum_of_its_best(best: Literal[1, 2], chosen: list[int]) -> None:
    logits = torch.tensor([[4.0, -9.0, 3.0, 2.9]])
    routing = Routing(2, normalize=True, scoring="sigmoid", num_groups=2, num_chosen_groups=1, group_best=best)
    assert sorted(route(logits, routing)[1][0].tolist()) == chosen


@pytest.mark.parametrize("routing", [Routing(5, True, "sigmoid", 4, 2), Routing(2, True, "sigmoid", 3)])
def test_groups_that_cannot_be_chosen_from_are_refused(routing: Routing) -> None:
    with pytest.raises(ValueError, match=r"of 8 experts cannot be chosen from"):
        routing.check(8)
