"""Which rows of a step are sampled, and with which operations. Host work: numpy over all rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proa_engine.core.types import NewRequestData
from proa_engine.kernels import sampling_params as columns
from proa_engine.kernels.sampling_params import LIMITS, Operation
from proa_engine.worker.columns import Columns, Write
from proa_engine.worker.staging import IntArray, Packer

_IS_LIMIT = [operation in LIMITS for operation in Operation]


@dataclass(frozen=True, slots=True)
class RowSet:
    """A subset of some rows: their number and the staged index of their row numbers, None if it is all rows."""

    count: int
    index: int | None

    @classmethod
    def of(cls, mask: npt.NDArray[np.bool_], packer: Packer) -> "RowSet":
        """`mask` [rows]."""
        count = int(np.count_nonzero(mask))
        return cls(count, packer.add(np.flatnonzero(mask)) if 0 < count < mask.size else None)


class SamplingColumns(Columns):
    """The parameters of sampling. `params` [slots, NUM_COLUMNS] float64, on the device."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.params = torch.zeros(max_num_seqs, columns.NUM_COLUMNS, dtype=torch.float64, device=device)
        self._vocab_size = vocab_size
        self._is_random = np.zeros(max_num_seqs, bool)
        # By sampling operation: the slots that need it.
        self._needs: list[npt.NDArray[np.bool_]] = [np.zeros(max_num_seqs, bool) for _ in Operation]
        self._new: list[tuple[int, list[float]]] = []  # slot and row of `params` that are not on the device yet

    def add(self, slot: int, request: NewRequestData) -> None:
        params = request.sampling_params
        key = params.key or 0
        row = [0.0] * columns.NUM_COLUMNS
        row[columns.TEMPERATURE] = params.temperature
        row[columns.KEY_LO] = key & 0xFFFFFFFF
        row[columns.KEY_HI] = key >> 32
        row[columns.NUM_PROMPT] = request.num_prompt_tokens
        self._is_random[slot] = params.temperature >= columns.MIN_TEMPERATURE
        for needs in self._needs:
            needs[slot] = False
        for name, column, neutral, _, operation in columns.PARAMETERS:
            value = getattr(params, name)
            if neutral is None:
                neutral = self._vocab_size
                value = min(value, neutral) or neutral
            row[column] = value
            if value != neutral:
                self._needs[operation][slot] = True
        self._new.append((slot, row))

    def pack_edits(self, packer: Packer) -> Write | None:
        if not self._new:
            return None
        slots = packer.add(np.array([slot for slot, _ in self._new], np.int64))
        rows = packer.add_floats(np.array([row for _, row in self._new]))
        self._new.clear()

        def write(arrays: Sequence[Tensor]) -> None:
            values = arrays[rows].view(torch.float64).view(-1, columns.NUM_COLUMNS)
            self.params.index_copy_(0, arrays[slots], values)

        return write

    def lay_out(self, slots: IntArray, packer: Packer) -> tuple[RowSet, list[RowSet]]:
        """The random rows of samples with these slots; and by operation the rows that need it, for LIMITS of the random
        ones."""
        is_random = self._is_random[slots]
        random_slots = slots[is_random]
        needs = [
            RowSet.of(needs[random_slots if is_limit else slots], packer)
            for needs, is_limit in zip(self._needs, _IS_LIMIT, strict=True)
        ]
        return RowSet.of(is_random, packer), needs
