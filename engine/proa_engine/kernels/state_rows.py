"""StateRows: where the states of a step's rows are read and written, the same for every recurrent layer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a batch, cut into segments: a layer writes the state at the end of each segment to a slot.

    A batch of R rows has S segments with at least one token each, in the order of the rows and without gaps. The first
    segment of a row starts from the state in the slot `read`, each other one from the state at the end of the segment
    before it; the last one ends with the row. Decodes (rows of one token) have one segment, so in a batch of decodes
    the last two tensors equal `AttentionMetadata.query_start_loc`. `read` and `write` of a row may be the same slot,
    but no row reads or writes a slot that another row of the batch writes.
    """

    read: torch.Tensor  # [R] int32: slot; -1: the row begins at position 0, its state is zero and nothing is read
    write: torch.Tensor  # [S] int32: slot; -1: padding, written nowhere
    first_segments: torch.Tensor  # [R + 1] int32: row r has segments first_segments[r] … first_segments[r + 1]
    segment_start_loc: torch.Tensor  # [S + 1] int32: segment s has tokens segment_start_loc[s] … [s + 1] of the batch
