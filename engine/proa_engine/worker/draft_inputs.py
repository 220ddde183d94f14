"""DraftInputs: the rows and positions of a step's draft tokens and of the samples that verify them. Host work.

The host lays a step out as if every draft token in flight had been accepted; `Drafter` moves the sampling rows to their
true positions on the device.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proa_engine.worker.input_batch import BatchEdits, InputBatch
from proa_engine.worker.sampling_inputs import Rows, Samples
from proa_engine.worker.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Staged indices and what the host knows. A row that samples is a decode or the last chunk of a prompt."""

    num_planned: list[int]  # draft tokens of each of the step's rows
    joined: tuple[int, int] | None  # slots of new requests, and their lengths in tokens
    token_rows: int  # [tokens]: the step's row of each token
    sampling_rows: int  # [sampling rows]: rows of the step that sample
    num_planned_sampling: int  # [sampling rows]: their numbers of draft tokens
    sample_rows: int  # [samples]: the step's row of each sample
    drafted: "DraftedRows | None"


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Staged indices of the rows with draft tokens. Draft tokens are a matrix [drafted rows, max_drafts]."""

    rows: int  # [drafted rows]: rows of the step
    num_planned: int  # [drafted rows]
    tokens: int  # [draft tokens]: the step's tokens that are drafts
    cells: int  # [draft tokens]: their flat positions in the matrix
    first_sample: int  # [drafted rows]


def lay_out_drafts(
    rows: Rows,
    counts: IntArray,
    is_sampled: npt.NDArray[np.bool_],
    batch: InputBatch,
    edits: BatchEdits,
    packer: Packer,
) -> tuple[DraftInputs, Samples]:
    """The drafts of a step, and its samples: one after each draft token and one after the token before them."""
    is_decode = is_sampled & (rows.starts + 1 >= batch.num_tokens[rows.slots])
    num_planned = np.where(is_decode, counts - 1, 0)
    sampling = np.flatnonzero(is_sampled)
    num_samples = num_planned[sampling] + 1
    sample_rows = np.repeat(sampling, num_samples)
    last_samples = np.cumsum(num_samples)
    num_after = np.repeat(last_samples, num_samples) - 1 - np.arange(sample_rows.size)  # later samples of the row
    joined = None
    if edits.token_rows:
        lengths = np.array([row.size for row in edits.token_rows], np.int64)
        joined = packer.add(np.array(edits.param_slots, np.int64)), packer.add(lengths)
    inputs = DraftInputs(
        num_planned=num_planned.tolist(),
        joined=joined,
        token_rows=packer.add(np.repeat(np.arange(counts.size), counts)),
        sampling_rows=packer.add(sampling),
        num_planned_sampling=packer.add(num_planned[sampling]),
        sample_rows=packer.add(sample_rows),
        drafted=_drafted_rows(rows, num_planned, sampling, last_samples - num_samples, batch.max_drafts, packer),
    )
    samples = Samples(
        rows=sample_rows,
        positions=rows.ends[sample_rows] - num_after,
        hidden_rows=rows.query_start_loc[1:][sample_rows] - 1 - num_after,
    )
    return inputs, samples


def _drafted_rows(
    rows: Rows, num_planned: IntArray, sampling: IntArray, first_samples: IntArray, max_drafts: int, packer: Packer
) -> DraftedRows | None:
    drafted = np.flatnonzero(num_planned)
    if not drafted.size:
        return None
    counts = num_planned[drafted]
    columns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return DraftedRows(
        rows=packer.add(drafted),
        num_planned=packer.add(counts),
        tokens=packer.add(np.repeat(rows.query_start_loc[drafted] + 1, counts) + columns),
        cells=packer.add(np.repeat(np.arange(drafted.size) * max_drafts, counts) + columns),
        first_sample=packer.add(first_samples[np.searchsorted(sampling, drafted)]),
    )
