"""Columns: the values that one feature keeps for each request of a worker, by slot, and its part of a step's inputs.

Sampling, pooling, images, states, adapters and drafts are features. `InputBatch`, the layout of steps and `ModelRunner`
loop over the columns of the features that the engine has. So a feature that is off costs nothing, and a new input of
requests is one class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from proa_engine.core.types import NewRequestData, StateSteps
from proa_engine.kernels.states.state_rows import StateRows
from proa_engine.layers.attention_metadata import EmbeddedRows
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.slots import Edits
from proa_engine.step.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows on the host, [rows] each: row `i` computes its request's tokens `starts[i]` up to `ends[i]`."""

    request_ids: list[str]
    slots: IntArray
    starts: IntArray
    ends: IntArray
    counts: IntArray  # tokens of each row
    query_start_loc: IntArray  # [rows + 1]
    states: Mapping[str, StateSteps]  # by request id; `SchedulerOutput.states`

    def token_positions(self) -> IntArray:
        """Return the position of each token in its request, [tokens]."""
        first = np.repeat(self.query_start_loc[:-1] - self.starts, self.counts)
        return np.arange(self.query_start_loc[-1]) - first


@dataclass(frozen=True, slots=True)
class Samples:
    """The tokens that a step samples, in order; [samples] each."""

    rows: IntArray  # of the step
    positions: IntArray  # position of the new token in its request
    hidden_rows: IntArray  # row of the hidden states


def last_samples(rows: Rows, sampled: IntArray) -> Samples:
    """Return one sample for each row in `sampled`, after the row's last token."""
    return Samples(sampled, rows.ends[sampled], rows.query_start_loc[1:][sampled] - 1)


@dataclass(slots=True)
class ForwardInputs:
    """The inputs of a forward pass of T tokens, which features complete and change. The fields behind `positions` are
    those of `AttentionMetadata`."""

    inputs: Tensor  # [T] int64 token ids, on a later pipeline stage what the stage before sent
    positions: Tensor  # [T] int64, or [3, T] of models with three positions a token
    query_start_loc: Tensor  # [rows + 1] int32
    states: StateRows | None = None
    token_types: Tensor | None = None
    images: EmbeddedRows | None = None
    prompt_embeds: EmbeddedRows | None = None
    ends: Tensor | None = None


class TokenInputs(Protocol):
    """A feature's part of a step of TokenRows, as staged indices."""

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        """Set the feature's fields of `forward`. `arrays` are the step's staged arrays. Device work."""
        ...


@dataclass(frozen=True, slots=True)
class TokenRows:
    """A batch of any kind, with an entry for each token: staged indices and host values. [tokens] unless noted."""

    num_decodes: int
    max_seq_len: int
    positions: int
    token_positions: int  # flat in the token table
    block_positions: int  # flat in each block table: the block of each token
    block_offsets: int
    slots: int  # [rows]
    query_start_loc: int  # [rows + 1]
    seq_lens: int  # [rows]
    features: Sequence[TokenInputs]


class Columns:
    """The base class of a feature's columns. Methods that a feature does not override do nothing.

    `add`, `remove` and the layout are host work; a step is either laid out by `lay_out` or, where a CUDA graph is
    replayed, by `lay_out_decodes`. `fill_decodes` is device work, which is captured.
    """

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        """Write the request's values into all columns of the slot."""

    def remove(self, slot: int) -> None:
        """Delete what the slot's request stored, if it used the feature."""

    def can_replay(self, rows: Rows) -> bool:
        """Whether a CUDA graph of decodes computes these rows correctly."""
        return True

    def lay_out(self, rows: Rows, packer: Packer) -> TokenInputs | None:
        """Return the feature's part of a step; None if no row needs the feature."""
        return None

    def lay_out_decodes(self, rows: Rows) -> IntArray | None:
        """Return the feature's columns for `pad_rows`, [columns, rows]; None if no row needs the feature."""
        return None

    def fill_decodes(self, forward: ForwardInputs, columns: Tensor, shape: GraphShape) -> None:
        """Set the feature's fields of `forward` from its columns of `pad_rows`, [columns, rows] int64."""
