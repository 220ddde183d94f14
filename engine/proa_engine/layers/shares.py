"""Which heads of a model, and which rows or columns of a matrix, a tensor parallel rank holds: arithmetic on counts.

Heads may be divided unevenly, without padding: each rank builds layers of its own sizes, and the ranks' outputs are
summed.
"""

from dataclasses import dataclass, replace
from math import lcm

from proa_engine.layers.head_count import check_head_count
from proa_engine.layers.weights import Slice

ALIGNED = 16  # values: rows of a matrix then begin at multiples of 16 bytes in every type


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of `total` heads or values in a row: `length` of them from `start` on."""

    total: int
    start: int
    length: int
    is_counted: bool = True  # False: a rank before this one holds the same part, so a sum over the ranks skips it

    @property
    def numbers(self) -> range:
        return range(self.start, self.start + self.length)

    def times(self, width: int) -> "Share":
        """The share of the values that these heads have, `width` for each head."""
        return replace(self, total=self.total * width, start=self.start * width, length=self.length * width)

    def along(self, dim: int) -> Slice:
        return Slice(dim, self.start, self.length)


def even_share(total: int, rank: int, num_ranks: int, what: str) -> Share:
    """Return one of `num_ranks` equal shares. Raises ValueError, naming `what`, if `total` is not divisible."""
    if total % num_ranks:
        sizes = ", ".join(str(size) for size in range(1, num_ranks) if total % size == 0)
        raise ValueError(
            f"{what} ({total}) cannot be divided by tensor_parallel_size ({num_ranks}); smaller sizes that work for "
            f"it: {sizes}"
        )
    length = total // num_ranks
    return Share(total, rank * length, length)


@dataclass(frozen=True, slots=True)
class HeadShares:
    """One rank's heads: `heads` use the heads in `shared` in equal groups.

    They are query heads and KV heads in attention, value heads and key heads in a gated delta net.
    """

    heads: Share
    shared: Share


def share_heads(num_heads: int, num_shared: int, rank: int, num_ranks: int, what: str) -> HeadShares:
    """Return the heads of a rank, of which the first rank has the most, and the shared heads that they use.

    With at least as many shared heads as ranks, a rank holds each of its shared heads with all heads that use it. With
    fewer, each shared head is on several ranks, which divide the heads that use it. Raises ValueError, naming `what`,
    if there are fewer heads than ranks.
    """
    check_head_count(num_heads, num_ranks, what)
    group = num_heads // num_shared
    if num_shared >= num_ranks:
        shared = _balanced(num_shared, rank, num_ranks)
        return HeadShares(shared.times(group), shared)
    # Shared head h is on the ranks from h * num_ranks // num_shared on.
    head = ((rank + 1) * num_shared - 1) // num_ranks
    first, end = (index * num_ranks // num_shared for index in (head, head + 1))
    part = _balanced(group, rank - first, end - first)
    heads = Share(num_heads, head * group + part.start, part.length)
    return HeadShares(heads, Share(num_shared, head, 1, is_counted=rank == first))


def share_width(width: int, unit: int, rank: int, num_ranks: int, what: str) -> Share:
    """Return a rank's share of a width that a matrix's format can cut into multiples of `unit`, equal if possible.

    One rank has the whole, whatever the unit. Unequal shares are multiples of `ALIGNED` too. Raises ValueError, naming
    `what`, if there are fewer of them than ranks.
    """
    if num_ranks == 1 or (width % num_ranks == 0 and width // num_ranks % unit == 0):
        return even_share(width, rank, num_ranks, what)
    unit = lcm(unit, ALIGNED)
    if width % unit == 0 and width // unit >= num_ranks:
        return _balanced(width // unit, rank, num_ranks).times(unit)
    raise ValueError(
        f"{what} ({width}) cannot be divided among tensor_parallel_size {num_ranks}, neither equally nor in multiples "
        f"of {unit}"
    )


def _balanced(total: int, rank: int, num_ranks: int) -> Share:
    """Return a share of `total`; those of the first ranks are larger by one where it is not divisible."""
    length, rest = divmod(total, num_ranks)
    return Share(total, rank * length + min(rank, rest), length + (rank < rest))
