"""Columns: what one feature keeps of a batch's requests, by slot. And the rows of a step, which it is laid out for.

A batch has the columns of the features that its engine has. So a feature that is off costs nothing, and a new input of
requests is one class: `add`, `remove` and what it writes on the device, and a `lay_out` that makes a step's inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from proa_engine.core.types import NewRequestData
from proa_engine.worker.staging import IntArray, Packer

Write = Callable[[Sequence[Tensor]], None]
"""Writes a step's edits to the device's memory. Gets the step's staged arrays."""


class Columns(Protocol):
    """The host side changes when a step's inputs are built, the device side with that step, in stream order."""

    def add(self, slot: int, request: NewRequestData) -> None:
        """Write all of the slot's state."""

    def remove(self, slot: int) -> None:
        """Forget the slot's request."""
        return  # enough where `add` writes everything anew

    def pack_edits(self, packer: Packer) -> Write | None:
        """Pack what has to be written on the device since the last call. None: nothing."""
        return None


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows on the host, [rows] each: row `i` computes its request's tokens `starts[i]` up to `ends[i]`."""

    request_ids: list[str]
    slots: IntArray
    starts: IntArray
    ends: IntArray
    query_start_loc: IntArray  # [rows + 1]


@dataclass(frozen=True, slots=True)
class Samples:
    """The tokens that a step samples, in order; [samples] each."""

    rows: IntArray  # of the step
    positions: IntArray  # position of the new token in its request
    hidden_rows: IntArray  # row of the hidden states


def last_samples(rows: Rows, sampled: IntArray) -> Samples:
    """One sample for each row in `sampled`, after the row's last token."""
    return Samples(sampled, rows.ends[sampled], rows.query_start_loc[1:][sampled] - 1)
