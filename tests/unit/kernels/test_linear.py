"""`Linear`: the bits of a row of a CPU's product do not depend on the number of rows and threads."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from proa_engine.kernels.products import linear
from proa_engine.kernels.products.linear import (
    HALF_MIN_NUMEL,
    ROW_POLICIES,
    HalfProduct,
    Linear,
    OneRow,
    Product,
    RowPolicy,
    find_row_policy,
    fits_half,
    has_half_products,
)


@pytest.fixture(autouse=True)
def forget_verdicts() -> Iterator[None]:
    threads = torch.get_num_threads()
    find_row_policy.cache_clear()
    yield
    find_row_policy.cache_clear()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "n", "bias"), [(1, 1, False), (16, 16, True), (33, 65, False), (700, 256, True)])
def test_rows_do_not_depend_on_their_number_without_onednn(
    k: int, n: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    weight, x, offset = torch.randn(n, k).to(dtype), torch.randn(300, k).to(dtype), torch.randn(n).to(dtype)
    ours = Linear(weight, offset if bias else None)
    whole = ours(x)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, offset if bias else None))
    for rows in (*range(1, 20), 64, 100, 257):
        assert torch.equal(ours(x[3 : 3 + rows]), whole[3 : 3 + rows]), f"{rows} rows"


def test_no_rows_give_no_rows() -> None:
    weight = torch.randn(5, 7)
    for half in (False, True):
        product = linear.make_product(weight, None, half)
        assert all(policy.multiply(product, torch.randn(0, 7)).shape == (0, 5) for policy in ROW_POLICIES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "n", "bias"), [(1, 1, False), (33, 8001, False), (701, 400, True)])
def test_a_large_weight_of_16_bits_is_held_in_float16_and_multiplied_in_float32(
    k: int, n: int, bias: bool, dtype: torch.dtype
) -> None:
    weight, x, offset = (torch.randn(n, k) * 0.02).to(dtype).float(), torch.randn(300, k), torch.randn(n)
    ours = Linear(weight, offset if bias else None)
    assert isinstance(ours.product, HalfProduct) == (has_half_products() and n * k >= HALF_MIN_NUMEL)
    whole = ours(x)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, offset if bias else None))
    for rows in (*range(1, 20), 64, 100, 257):
        assert torch.equal(ours(x[3 : 3 + rows]), whole[3 : 3 + rows]), f"{rows} rows"


@pytest.mark.parametrize("number", [1 / 3, 1 + 2**-11, 65536.0, float("nan"), float("inf")])
def test_a_weight_whose_numbers_float16_does_not_have_is_held_in_float32(number: float) -> None:
    weight = torch.ones(512, 512)
    assert fits_half(weight) == has_half_products()
    weight[511, 3] = number
    assert not fits_half(weight)


Inexact = Callable[[torch.Tensor], float]  # the error of a product of these rows


def use_products_with(error: Inexact, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_product(weight: torch.Tensor, bias: torch.Tensor | None, half: bool) -> Product:
        return lambda x: (x[:, :1] * weight[:, 0]) * (1 + error(x))

    monkeypatch.setattr(linear, "make_product", make_product)


@pytest.mark.parametrize(
    ("error", "policy"),
    [
        (lambda x: 0.0, RowPolicy()),
        (lambda x: 0.1 * (x.shape[0] == 1), RowPolicy(min_rows=4)),
        (lambda x: 0.1 * (x.shape[0] < 8), RowPolicy(min_rows=8)),
        (lambda x: 0.1 * x.shape[0], RowPolicy(tile_rows=16)),
    ],
    ids=["rows never matter", "one row differs", "fewer than 8 rows differ", "every count differs"],
)
def test_the_first_policy_that_holds_is_used(
    error: Inexact, policy: RowPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_products_with(error, monkeypatch)
    product = Linear(torch.randn(3, 2))
    x = torch.randn(70, 2)
    whole = product(x)
    assert product.policy == policy
    for rows in (1, 2, 5, 16, 17, 40):
        assert torch.equal(product(x[7 : 7 + rows]), whole[7 : 7 + rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_order_of_a_sum_is_found_although_results_are_rounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_product(weight: torch.Tensor, bias: torch.Tensor | None, half: bool) -> Product:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            y, terms = torch.zeros(x.shape[0], weight.shape[0]), range(weight.shape[1])
            for i in reversed(terms) if x.shape[0] == 1 else terms:
                y += x[:, i : i + 1].float() * weight[:, i].float()
            return y.to(dtype)

        return multiply

    monkeypatch.setattr(linear, "make_product", make_product)
    assert find_row_policy(16, 16, False, dtype, 1).policy == RowPolicy(min_rows=4)


def test_a_policy_must_hold_with_one_thread_and_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    use_products_with(lambda x: 0.1 * (x.shape[0] == 1 and torch.get_num_threads() > 1), monkeypatch)
    assert find_row_policy(3, 2, False, torch.float32, 1).policy == RowPolicy()
    assert find_row_policy(3, 2, False, torch.float32, 2).policy == RowPolicy(min_rows=4)


def test_one_warning_is_logged_where_no_policy_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(1000))
    use_products_with(lambda x: 0.1 * next(calls), monkeypatch)
    linear._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for size in (3, 4):
            assert Linear(torch.randn(size, 2)).policy == RowPolicy()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "results depend on the batch on this processor"
    ]


def packed_product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return linear.make_product(weight, None, False)(x)


def test_one_row_of_a_small_weight_is_a_weighted_sum_of_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Counted(OneRow):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x.shape[0])
            return super().__call__(x)

    monkeypatch.setattr(linear, "OneRow", Counted)
    small, x = Linear(torch.randn(48, 64)), torch.randn(3, 64)
    calls.clear()  # those of the probe
    assert torch.equal(small(x)[1:2], small(x[1:2]))
    assert calls == [1]


@pytest.mark.parametrize(
    ("k", "n", "bias"),
    [(linear.ONE_ROW_MAX_INPUTS + 1, 8, False), (1024, linear.ONE_ROW_MAX_NUMEL // 1024 + 1, False), (64, 48, True)],
    ids=["many inputs", "a large weight", "a bias"],
)
def test_one_row_of_another_weight_is_a_product_like_any(k: int, n: int, bias: bool) -> None:
    assert Linear(torch.randn(n, k), torch.randn(n) if bias else None).one_row is None


def test_a_weighted_sum_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inexact(OneRow):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * (1 + 2**-20)

    monkeypatch.setattr(linear, "OneRow", Inexact)
    weight, x = torch.randn(48, 64), torch.randn(3, 64)
    ours = Linear(weight)
    assert ours.one_row is None
    assert torch.equal(ours(x[:1]), packed_product(weight, x)[:1])
