"""CacheGroups: the sizes of the KV cache that the core divides among requests."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroups:
    """The shape of the KV cache: a request holds blocks of table 0, of one table for each of `windows`, and a state
    slot. With cross-attention it also holds blocks for `cross_tokens` tokens at most, those of its audio.

    The core knows no layers and no bytes. The worker stores all layers with full attention in the blocks of table 0,
    and packs layers with a sliding window into further tables, whose blocks have equal bytes. All tables allocate from
    one pool of `num_blocks`, each of `block_size` tokens. There are `num_state_slots` slots for the states of recurrent
    layers, 0 if the model has none; each has one request's states at one position.

    `checkpoint_interval` and `min_junction` are in tokens, see `proa.blocks.checkpoint_positions`. `max_step_tokens` is
    the largest distance between a request's last token that is known to be computed and the end of its next step.
    """

    num_blocks: int
    block_size: int
    windows: tuple[int, ...] = ()  # of table 1, 2, …: tokens that a token attends to, itself included
    num_state_slots: int = 0
    cross_tokens: int = 0  # of the longest audio that cross-attention reads; 0: the model has none
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
        """Whether a request can continue a prefix only where the windows' blocks and the states are cached too."""
        return bool(self.windows or self.num_state_slots)

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest request that fits if it has all blocks."""
        columns = range(1, self.num_blocks + 1)
        return bisect_right(columns, self.num_blocks, key=self._blocks_of_columns) * self.block_size

    def concurrency(self, num_tokens: int) -> float:
        """Return how many requests of `num_tokens` tokens fit into the blocks at a time."""
        return self.num_blocks / self.blocks_of(num_tokens)

    def blocks_of(self, num_tokens: int) -> int:
        """Return the largest number of blocks that a request of `num_tokens` tokens holds at a time."""
        return self._blocks_of_columns(-(-num_tokens // self.block_size))

    def first_column(self, window: int, position: int) -> int:
        """Return the first column with a token that the token at `position` attends to."""
        return max(position - window + 1, 0) // self.block_size

    def window_columns(self, window: int) -> int:
        """Return the largest number of blocks that a request holds in a table with this window.

        They cover the tokens that the next step's first token attends to, and the step's own tokens. Two more blocks
        are needed because neither range starts or ends at a block boundary.
        """
        return -(-(window - 1 + self.max_step_tokens) // self.block_size) + 2

    def _blocks_of_columns(self, num_columns: int) -> int:
        in_windows = sum(min(num_columns, self.window_columns(window)) for window in self.windows)
        return num_columns + in_windows + -(-self.cross_tokens // self.block_size)
