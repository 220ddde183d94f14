"""One row's product by a small weight, which has a path of its own on a CPU."""

import pytest
import torch

from proa_engine.kernels import linear
from proa_engine.kernels.linear import Linear, OneRow


def packed_product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return product


@pytest.mark.parametrize(("k", "n"), [(1, 1), (33, 65), (192, 576), (1024, 16)])
def test_one_row_has_the_bits_of_the_packed_product(k: int, n: int) -> None:
    weight, x = torch.randn(n, k), torch.randn(1, k)
    assert torch.equal(OneRow(weight)(x), packed_product(weight, x))


def test_one_row_takes_the_path_of_its_own_where_the_weight_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Counted(OneRow):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x.shape[0])
            return super().__call__(x)

    monkeypatch.setattr(linear, "OneRow", Counted)
    small, x = Linear(torch.randn(48, 64)), torch.randn(3, 64)
    calls.clear()  # of the trial while loading
    assert torch.equal(small(x)[1:2], small(x[1:2]))
    assert calls == [1]


@pytest.mark.parametrize(
    ("k", "n", "bias"),
    [(linear.MAX_SUM_INPUTS + 1, 8, False), (1024, linear.MAX_SUM_NUMBERS // 1024 + 1, False), (64, 48, True)],
    ids=["many inputs", "a large weight", "a bias"],
)
def test_other_weights_have_no_path_for_one_row(k: int, n: int, bias: bool) -> None:
    assert Linear(torch.randn(n, k), torch.randn(n) if bias else None).one_row is None


def test_a_sum_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inexact(OneRow):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * (1 + 2**-20)

    monkeypatch.setattr(linear, "OneRow", Inexact)
    weight, x = torch.randn(48, 64), torch.randn(1, 64)
    fallen_back = Linear(weight)
    assert fallen_back.one_row is None
    assert torch.equal(fallen_back(x), packed_product(weight, x))
