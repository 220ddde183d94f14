"""Columns: the values that one feature keeps for each request of a worker, by slot, and its part in steps.

Pooling, images, states, adapters and drafts are features. `InputBatch`, the layout of steps and `ModelRunner` loop over
the features that requests use, and name none. So a feature that no request uses costs nothing, and a new input of
requests is one class.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from proa_engine.core.types import NewRequestData, RowOutput, SchedulerOutput, StateSteps
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.slots import Edits
from proa_engine.step.staging import DraftCopy, IntArray, Packer


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows on the host, [rows] each: row `i` computes its request's tokens `starts[i]` up to `ends[i]`."""

    request_ids: list[str]
    slots: IntArray
    starts: IntArray
    ends: IntArray
    counts: IntArray  # tokens of each row
    num_samples: IntArray  # a token is sampled after each of the row's last so many tokens
    query_start_loc: IntArray  # [rows + 1]
    states: Mapping[str, StateSteps]  # by request id; `SchedulerOutput.states`

    def token_positions(self) -> IntArray:
        """Return the position of each token in its request, [tokens]."""
        first = np.repeat(self.query_start_loc[:-1] - self.starts, self.counts)
        return np.arange(self.query_start_loc[-1]) - first


@dataclass(frozen=True, slots=True)
class Samples:
    """The tokens that a step samples, one row of logits each, in the order of the step's rows."""

    num_rows: int
    rows: IntArray  # [num_rows], on the host: the step's row of each sample
    hidden_rows: int | None  # staged index; None: a token is sampled after every token of the step
    slots: int  # staged index
    positions: int  # staged index: position of the new token in its request
    write_to: int  # staged index: its flat position in the token table


@dataclass(slots=True)
class ForwardInputs:
    """The inputs of a forward pass of T tokens, which features complete and change."""

    inputs: Tensor  # [T] int64 token ids, on a later pipeline stage what the stage before sent
    positions: Tensor  # [T] int64, or [3, T] of models with three positions a token
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class Replayed:
    """In place of a forward pass's inputs where a graph was replayed."""

    run_rest: Callable[[], object]  # run the graph of what follows the sampling, if there is one


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step's forward pass has left."""

    hidden: Tensor  # [tokens, hidden_size]; with pipeline stages only of sampled tokens, unless a part `reads_hidden`
    forward: "ForwardInputs | Replayed"


class TokenInputs(Protocol):
    """A feature's inputs of the layers in a step of TokenRows, as staged indices."""

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


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step that is laid out, except for the parts of features."""

    plan: SchedulerOutput
    rows: Rows
    token_rows: TokenRows | None  # None: a graph computes the positions of the step's tokens
    samples: Samples | None  # None: no row samples


@dataclass(slots=True)
class StepOutputs:
    """A step's results on the host, before they are a `ModelRunnerOutput`."""

    others: defaultdict[str, RowOutput]  # by id of the requests whose result is not exactly one sampled token
    num_kept: list[int]  # by row: its first so many samples are kept


class StepPart:
    """What a feature does in a step before its layers run and after its tokens are sampled.

    `before_forward`, `after_replay` and `after_sample` are device work, on each rank; `add_results` is host work, once
    the results are copied to rank 0's host. Methods that a feature does not override do nothing.
    """

    is_large = False  # whether `before_forward` is work for all of a CPU's threads, however few the step's tokens
    reads_hidden = False  # whether `after_sample` reads hidden states of tokens after which none is sampled

    @property
    def draft_copies(self) -> Sequence[DraftCopy]:
        """Of draft tokens that the host reads before it samples the step."""
        return ()

    def before_forward(self, arrays: list[Tensor]) -> None:
        """Update the feature's tables. May replace the step's staged `arrays`."""

    def after_replay(self, arrays: Sequence[Tensor]) -> None:
        """Do what `before_forward` cannot do where a graph computes what it needs."""

    def after_sample(self, arrays: Sequence[Tensor], computed: Computed, token_ids: Tensor | None) -> list[Tensor]:
        """Return the feature's results, the same on every rank.

        `token_ids` [samples] int64 are the step's samples; None if it has none.
        """
        return []

    def add_results(self, results: list[Tensor], outputs: StepOutputs) -> None:
        """Write the results of `after_sample` to the outputs of their requests. Not called if there are none."""


class Columns:
    """The base class of a feature's columns. Methods that a feature does not override do nothing.

    `add`, `remove` and the layout are host work; a step is either laid out by `lay_out` or, where a CUDA graph is
    replayed, by `lay_out_decodes`, and then by `lay_out_part`. `before_decodes`, `fill_decodes` and `after_decodes`
    are device work, which is captured.
    """

    adds_drafts = False  # whether rows have draft tokens: then a step's tokens and samples are not known to the host
    follows_decodes = False  # whether a graph has work of the feature behind the sampling, `after_decodes`

    @property
    def is_used(self) -> bool:
        """Whether any request in the batch uses the feature. Steps are not laid out with it otherwise."""
        return True

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        """Write the request's values into all columns of the slot."""

    def set_length(self, slot: int, num_tokens: int, edits: Edits) -> None:
        """Take the number of tokens of the slot's request, after the host has written some."""

    def remove(self, slot: int) -> None:
        """Delete what the slot's request stored, if it used the feature."""

    def graph_shape(self, rows: Rows, shape: GraphShape) -> GraphShape | None:
        """Return the shape of the CUDA graph that computes these decodes: `shape`, or the same with the feature's
        columns; None if no graph computes them correctly."""
        return shape

    def lay_out(self, rows: Rows, packer: Packer) -> TokenInputs | None:
        """Return the feature's inputs of the layers; None if no row needs the feature."""
        return None

    def lay_out_decodes(self, rows: Rows) -> IntArray | None:
        """Return the feature's columns for `pad_rows`, [columns, rows]; None if no row needs the feature."""
        return None

    def lay_out_part(self, step: StepLayout, packer: Packer) -> StepPart | None:
        """Return what the feature does before the layers and after the sampling; None: nothing."""
        return None

    def before_decodes(self, columns: Tensor, shape: GraphShape) -> None:
        """Change the columns of `pad_rows`, [columns, rows] int64, before inputs are computed from them."""

    def fill_decodes(self, forward: ForwardInputs, columns: Tensor, shape: GraphShape) -> None:
        """Set the feature's fields of `forward` from its columns of `pad_rows`, [columns, rows] int64."""

    def after_decodes(self, columns: Tensor, shape: GraphShape, hidden: Tensor) -> Tensor:
        """Work of a feature that `follows_decodes` with hidden states [rows * width, hidden_size] of the layers, behind
        the sampling. Returns anything."""
        raise NotImplementedError
