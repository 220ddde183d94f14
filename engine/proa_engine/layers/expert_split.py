"""How ranks divide a model's routed experts: each expert by its width, or expert by expert (expert parallelism).

By width, every rank computes equally much whatever experts the tokens choose. Whole experts can be divided in every
format of the weights, and their products are larger and fewer.
"""

from dataclasses import dataclass

from proa_engine.kernels.experts.moe_pairs import ExpertRange


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The routed experts of a layer."""

    num_experts: int
    inner_size: int  # the width of each
    input_size: int | None = None  # values that each reads; None: hidden_size
    num_matrices: int = 3  # of each

    def num_parameters(self, hidden_size: int) -> int:
        return self.num_matrices * (self.input_size or hidden_size) * self.inner_size * self.num_experts


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    sizes: ExpertSizes
    num_ranks: int
    by_expert: bool  # False: by width
    reason: str

    @property
    def largest_share(self) -> float:
        """The part of all experts' weights that the rank with the most has."""
        if not self.by_expert:
            return 1 / self.num_ranks
        return expert_range(self.sizes.num_experts, 0, self.num_ranks).size / self.sizes.num_experts

    def __str__(self) -> str:
        """One line for the log."""
        sizes, num_ranks = self.sizes, self.num_ranks
        if num_ranks == 1:
            return f"experts: one rank holds all {sizes.num_experts} experts of width {sizes.inner_size}"
        what = f"experts: {num_ranks} ranks divide {sizes.num_experts} experts of width {sizes.inner_size}"
        return f"{what} {'by expert' if self.by_expert else 'by width'}: {self.reason}"


def split_experts(sizes: ExpertSizes, num_ranks: int, unit: int, *, wanted: bool) -> ExpertSplit:
    """Choose how ranks divide the experts: by width if it can be cut and `wanted`, the user's option, is not set.

    `unit` is `LinearMethod.width_unit`. Raises ValueError if there are fewer experts than ranks and they cannot be
    divided by width, or shall not.
    """
    share, rest = divmod(sizes.inner_size, num_ranks)
    if wanted:
        reason = "enable_expert_parallel is set"
    elif rest:
        reason = f"the width cannot be divided by {num_ranks}"
    elif share % unit:
        reason = f"the format of the weights cannot cut a width of {share} for each rank, no multiple of {unit}"
    else:
        return ExpertSplit(sizes, num_ranks, False, "the width can be cut")
    if sizes.num_experts < num_ranks:
        raise ValueError(
            f"{sizes.num_experts} experts cannot be divided among tensor_parallel_size {num_ranks} by expert ({reason})"
        )
    return ExpertSplit(sizes, num_ranks, True, reason)


def expert_range(num_experts: int, rank: int, num_ranks: int) -> ExpertRange:
    """Return the experts of a rank. The first ranks have one more where they are not divisible."""
    size, rest = divmod(num_experts, num_ranks)
    return ExpertRange(rank * size + min(rank, rest), size + (rank < rest), num_experts)
