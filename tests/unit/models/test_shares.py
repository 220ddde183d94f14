"""Which heads each rank holds, for any number of heads, shared heads and ranks."""

from itertools import product

import pytest

from proa_engine.layers.shares import HeadShares, Share, even_share, share_heads, share_width

SIZES = [
    (num_shared * group, num_shared, num_ranks)
    for num_shared, group, num_ranks in product(range(1, 21), range(1, 9), range(1, 17))
    if num_shared * group >= num_ranks
]


def shares_of_all(num_heads: int, num_shared: int, num_ranks: int) -> list[HeadShares]:
    return [share_heads(num_heads, num_shared, rank, num_ranks, "heads") for rank in range(num_ranks)]


def members(share: Share) -> range:
    return range(share.start, share.start + share.length)


def test_every_head_is_on_one_rank_beside_the_shared_head_that_it_uses() -> None:
    for num_heads, num_shared, num_ranks in SIZES:
        ranks = shares_of_all(num_heads, num_shared, num_ranks)
        assert [head for rank in ranks for head in members(rank.heads)] == list(range(num_heads))
        for rank in ranks:
            used = [head // (num_heads // num_shared) for head in members(rank.heads)]
            of_each = rank.heads.length // rank.shared.length  # kernels need equal groups
            assert used == [head for head in members(rank.shared) for _ in range(of_each)]


def test_every_shared_head_is_counted_once() -> None:
    for size in SIZES:
        counted = [head for rank in shares_of_all(*size) if rank.shared.is_counted for head in members(rank.shared)]
        assert counted == list(range(size[1]))


def test_the_first_rank_has_the_most_heads_of_both_kinds() -> None:
    for size in SIZES:
        first, *others = shares_of_all(*size)
        for rank in others:
            assert rank.heads.length <= first.heads.length
            assert rank.shared.length <= first.shared.length


@pytest.mark.parametrize(
    ("size", "heads", "shared"),
    [
        ((20, 20, 8), [3, 3, 3, 3, 2, 2, 2, 2], [3, 3, 3, 3, 2, 2, 2, 2]),
        ((32, 4, 8), [4] * 8, [1] * 8),
        ((16, 2, 4), [4] * 4, [1] * 4),
        ((10, 2, 4), [3, 2, 3, 2], [1] * 4),
        ((40, 8, 4), [10] * 4, [2] * 4),
    ],
)
def test_heads_are_divided_as_evenly_as_their_groups_allow(
    size: tuple[int, int, int], heads: list[int], shared: list[int]
) -> None:
    ranks = shares_of_all(*size)
    assert [rank.heads.length for rank in ranks] == heads
    assert [rank.shared.length for rank in ranks] == shared


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"value heads \(6\) are fewer than tensor_parallel_size \(8\).* at most 6"):
        share_heads(6, 2, 0, 8, "value heads")


def test_what_is_not_divisible_is_refused_with_the_sizes_that_work() -> None:
    message = (
        r"width \(12\) cannot be divided by tensor_parallel_size \(8\); smaller sizes that work for it: 1, 2, 3, 4, 6"
    )
    with pytest.raises(ValueError, match=message):
        even_share(12, 0, 8, "width")
    assert even_share(12, 1, 4, "width") == Share(12, 3, 3)


@pytest.mark.parametrize(
    ("width", "unit", "num_ranks", "lengths"),
    [
        (96, 1, 4, [24] * 4),
        (1536, 128, 4, [384] * 4),
        (1536, 128, 8, [256] * 4 + [128] * 4),  # GLM-4.6's shared expert in blocks of 128
        (14336, 1, 6, [2400] * 2 + [2384] * 4),
        (14336, 128, 6, [2432] * 4 + [2304] * 2),
        (96, 1, 5, [32, 16, 16, 16, 16]),
        (97, 128, 1, [97]),  # of a matrix that the format leaves as it is
    ],
)
def test_a_width_is_cut_equally_or_in_multiples_of_the_unit(
    width: int, unit: int, num_ranks: int, lengths: list[int]
) -> None:
    shares = [share_width(width, unit, rank, num_ranks, "width") for rank in range(num_ranks)]
    assert [share.length for share in shares] == lengths
    assert [value for share in shares for value in members(share)] == list(range(width))


@pytest.mark.parametrize(("width", "unit", "num_ranks"), [(97, 1, 2), (96, 1, 7), (1536, 128, 16), (1500, 128, 8)])
def test_a_width_that_cannot_be_cut_is_refused_by_name(width: int, unit: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"inner width \({width}\) cannot be divided among tensor_parallel_size"):
        share_width(width, unit, 0, num_ranks, "inner width")
