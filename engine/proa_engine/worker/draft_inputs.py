"""DraftInputs: where a step's drafts stand and what is sampled to check them. Pure host work, as in `step_inputs`.

The host lays a step out as if every draft still in flight had been accepted; `Drafter` moves the rows that sample to
where they really are.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proa_engine.worker.input_batch import BatchEdits, InputBatch
from proa_engine.worker.sampling_inputs import Rows, Samples
from proa_engine.worker.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Places, and what the host knows. A sampling row holds one known token, or is a prompt's last chunk."""

    num_planned: list[int]  # a row of the step
    joined: tuple[int, int] | None  # slots of requests that are new here, and their lengths
    token_rows: int  # the step's row of each token
    sampling_rows: int  # rows of the step that sample
    num_planned_sampling: int  # of each of those
    sample_rows: int  # the step's row of each sample
    drafted: "DraftedRows | None"


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """The rows with drafts among those that sample; drafts are a matrix of these rows and `max_drafts` columns."""

    rows: int  # of the step
    num_planned: int
    tokens: int  # the step's tokens that are drafts
    cells: int  # and where each is in the matrix, flat
    first_sample: int  # of each row


def lay_out_drafts(
    rows: Rows,
    counts: IntArray,
    is_sampled: npt.NDArray[np.bool_],
    batch: InputBatch,
    edits: BatchEdits,
    packer: Packer,
) -> tuple[DraftInputs, Samples]:
    """The drafts of a step, and its samples: one behind each draft and one behind the token before them."""
    is_decode = is_sampled & (rows.starts + 1 >= batch.num_tokens[rows.slots])
    num_planned = np.where(is_decode, counts - 1, 0)
    sampling = np.flatnonzero(is_sampled)
    num_samples = num_planned[sampling] + 1
    sample_rows = np.repeat(sampling, num_samples)
    last_samples = np.cumsum(num_samples)
    behind = np.repeat(last_samples, num_samples) - 1 - np.arange(sample_rows.size)  # samples that follow in the row
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
        positions=rows.ends[sample_rows] - behind,
        hidden_rows=rows.query_start_loc[1:][sample_rows] - 1 - behind,
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
