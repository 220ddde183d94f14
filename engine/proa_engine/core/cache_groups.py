"""CacheGroups: the sizes of the KV cache that the core divides among requests."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroups:
    """What a request holds: blocks of one table, and of one more table for each of `windows`; a state slot.

    The core knows no layers and no bytes. The worker stores all layers with full attention in the blocks of table 0,
    and packs layers with a sliding window into as many further tables as their blocks of equal bytes need. All tables
    take their blocks from one pool of `num_blocks`, each of `block_size` tokens. The layers with recurrent states have
    `num_state_slots` slots, each one request's states at one position; 0: the model has none.

    `checkpoint_interval`, `min_junction`: see `proa.blocks.checkpoint_positions`, in tokens. `max_step_tokens`: the
    most tokens between the last one that is known to be computed and the end of a request's next step.
    """

    num_blocks: int
    block_size: int
    windows: tuple[int, ...] = ()  # of table 1, 2, …: tokens that a token attends to, itself included
    num_state_slots: int = 0
    checkpoint_interval: int = 0
    min_junction: int = 0
    max_step_tokens: int = 0

    def __post_init__(self) -> None:
        assert min(self.windows, default=2) > 1, "a checkpoint needs at least one block behind each window"
        assert self.max_step_tokens > 0 or not self.windows
        assert self.checkpoint_interval % self.block_size == 0

    @property
    def num_tables(self) -> int:
        return 1 + len(self.windows)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a request can continue only where the windows' blocks and the states are cached too."""
        return bool(self.windows or self.num_state_slots)

    @property
    def capacity(self) -> int:
        """Tokens of the longest request that fits if it has all blocks."""
        columns = range(1, self.num_blocks + 1)
        return bisect_right(columns, self.num_blocks, key=self._blocks_of_columns) * self.block_size

    def concurrency(self, num_tokens: int) -> float:
        """How many requests of so many tokens the blocks are enough for."""
        return self.num_blocks / self.blocks_of(num_tokens)

    def blocks_of(self, num_tokens: int) -> int:
        """The most blocks that a request of so many tokens holds at a time."""
        return self._blocks_of_columns(-(-num_tokens // self.block_size))

    def first_column(self, window: int, position: int) -> int:
        """The first column of which the token at `position` attends to a token."""
        return max(position - window + 1, 0) // self.block_size

    def window_columns(self, window: int) -> int:
        """The most blocks that a request holds in a table with this window.

        These cover the tokens that the next step's first token attends to and the step's own. Two more are for the
        ends, which are not on block boundaries.
        """
        return -(-(window - 1 + self.max_step_tokens) // self.block_size) + 2

    def _blocks_of_columns(self, num_columns: int) -> int:
        return num_columns + sum(min(num_columns, self.window_columns(window)) for window in self.windows)
