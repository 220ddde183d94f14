"""DraftInputs: the rows of a step that may have draft tokens and the samples that verify them. Host work.

The host lays a step out as if every draft token in flight had been accepted; `Drafter` moves the rows to their
requests' true ends on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proa_engine.worker.columns import Rows, Samples
from proa_engine.worker.decode_graphs import pad_rows
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Staged indices and what the host knows. A row that samples is a decode or the last chunk of a prompt."""

    num_planned: list[int]  # draft tokens of each of the step's rows, at most
    joined: tuple[int, int] | None  # slots of new requests, and their lengths in tokens
    first_samples: int  # [sampling rows]
    num_before: int  # [samples]: samples of the row before each
    moves: "TokenMoves | None"  # None: a graph computes the positions


@dataclass(frozen=True, slots=True)
class TokenMoves:
    """Staged indices of what the positions of a batch of TokenRows are corrected with."""

    rows: int  # [3 * rows], as `propose_ngrams` takes them
    token_rows: int  # [tokens]: the step's row of each token


def count_drafts(rows: Rows, counts: IntArray, batch: InputBatch) -> IntArray:
    """The most draft tokens of each row, [rows]: what a decode computes beside its last known token."""
    num_tokens = batch.num_tokens[rows.slots]
    is_decode = (rows.ends >= num_tokens) & (rows.starts + 1 >= num_tokens)
    return np.where(is_decode, counts - 1, 0)


def token_moves(rows: Rows, counts: IntArray, num_planned: IntArray, packer: Packer) -> TokenMoves:
    return TokenMoves(
        rows=packer.add(pad_rows(rows.slots, rows.ends, 1 + num_planned, counts.size)),
        token_rows=packer.add(np.repeat(np.arange(counts.size), counts)),
    )


def lay_out_drafts(
    rows: Rows,
    sampling: IntArray,
    num_planned: IntArray,
    new_requests: Sequence[tuple[int, int]],
    moves: TokenMoves | None,
    packer: Packer,
) -> tuple[DraftInputs, Samples]:
    """The drafts of a step, and the samples of its rows `sampling`: one after each draft token and one after the token
    before them. `new_requests`: slots and lengths in tokens of those that the step adds."""
    num_samples = num_planned[sampling] + 1
    sample_rows = np.repeat(sampling, num_samples)
    first_samples = np.cumsum(num_samples) - num_samples
    num_before = np.arange(sample_rows.size) - np.repeat(first_samples, num_samples)
    joined = None
    if new_requests:
        slots, lengths = np.array(new_requests, np.int64).T
        joined = packer.add(slots), packer.add(lengths)
    inputs = DraftInputs(
        num_planned=num_planned.tolist(),
        joined=joined,
        first_samples=packer.add(first_samples),
        num_before=packer.add(num_before),
        moves=moves,
    )
    num_after = num_planned[sample_rows] - num_before
    samples = Samples(
        rows=sample_rows,
        positions=rows.ends[sample_rows] - num_after,
        hidden_rows=rows.query_start_loc[1:][sample_rows] - 1 - num_after,
    )
    return inputs, samples
