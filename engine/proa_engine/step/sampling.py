"""SamplingColumns: each slot's sampling parameters, and which operations the samples of a step need. Host work."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from proa_engine.core.types import NewRequestData
from proa_engine.kernels.sampling import sampling_params as columns
from proa_engine.kernels.sampling.sampling_params import LIMITS, SamplingOperation
from proa_engine.step.columns import Columns, Rows, Samples
from proa_engine.step.logprobs import LogprobColumns, LogprobInputs
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import Packer, RowSet
from proa_engine.step.token_rules import PackedRules, RuleColumns

_IS_LIMIT = [operation in LIMITS for operation in SamplingOperation]


@dataclass(frozen=True, slots=True)
class SamplingInputs(Samples):
    """A step's samples, and the operations that they need."""

    max_num_tokens: int  # most tokens before a sample, for penalties; 0 if no row has any
    random: RowSet
    needs: list[RowSet]  # by operation: of all rows, for LIMITS of the random rows
    logprobs: LogprobInputs | None  # None: no row requests any
    rules: PackedRules | None  # None: no row has any

    @property
    def is_plain(self) -> bool:
        """Whether one token is sampled after every token of the step, with nothing but temperature, min-p, top-k and
        top-p."""
        has_penalties = self.needs[SamplingOperation.PENALTIES].count > 0
        return self.hidden_rows is None and self.logprobs is None and self.rules is None and not has_penalties


class SamplingColumns(Columns):
    """Sampling parameters, with the columns of log probabilities and token rules.

    The host stores which operations a slot needs, the device the parameters.
    """

    def __init__(self, tables: SlotTables, eos_token_ids: Collection[int]) -> None:
        self.params = torch.zeros(tables.num_slots, columns.NUM_COLUMNS, dtype=torch.float64, device=tables.device)
        self._logprobs = LogprobColumns(tables)
        self._rules = RuleColumns(tables, eos_token_ids)
        self._tables = tables
        self._is_random = np.zeros(tables.num_slots, bool)
        # By operation: the slots that need it.
        self._needs: list[npt.NDArray[np.bool_]] = [np.zeros(tables.num_slots, bool) for _ in SamplingOperation]

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        self._is_random[slot] = request.sampling_params.temperature >= columns.MIN_TEMPERATURE
        edits.write(self.params, (slot,), self._add_params(request, slot))
        self._logprobs.add(request, slot)
        self._rules.add(request, slot)

    def remove(self, slot: int) -> None:
        self._logprobs.remove(slot)
        self._rules.remove(slot)

    def lay_out_samples(self, rows: Rows, packer: Packer) -> SamplingInputs | None:
        """Return the step's samples; None if no row samples."""
        sample_rows = np.repeat(np.arange(rows.slots.size), rows.num_samples)
        if not sample_rows.size:
            return None
        # Of each sample: the row's samples behind it.
        num_after = np.repeat(np.cumsum(rows.num_samples), rows.num_samples) - np.arange(1, sample_rows.size + 1)
        slots = rows.slots[sample_rows]
        positions = rows.ends[sample_rows] - num_after
        hidden_rows = rows.query_start_loc[1:][sample_rows] - 1 - num_after
        is_random = self._is_random[slots]
        random_slots = slots[is_random]
        needs = [
            RowSet.of(needs[random_slots if is_limit else slots], packer)
            for needs, is_limit in zip(self._needs, _IS_LIMIT, strict=True)
        ]
        return SamplingInputs(
            num_rows=slots.size,
            rows=sample_rows,
            hidden_rows=None if slots.size == rows.query_start_loc[-1] else packer.add(hidden_rows),
            slots=packer.add(slots),
            positions=packer.add(positions),
            write_to=packer.add(slots * self._tables.token_width + positions),
            max_num_tokens=int(positions.max()) if needs[SamplingOperation.PENALTIES].count else 0,
            random=RowSet.of(is_random, packer),
            needs=needs,
            logprobs=self._logprobs.lay_out_samples(rows, sample_rows, packer) if self._logprobs.users else None,
            rules=self._rules.lay_out_samples(slots, positions, packer) if self._rules.by_slot else None,
        )

    def _add_params(self, request: NewRequestData, slot: int) -> list[float]:
        """Return the request's row of the parameter table, [NUM_COLUMNS]. Also store which operations its slot
        needs."""
        params = request.sampling_params
        key = params.key or 0
        row = [0.0] * columns.NUM_COLUMNS
        row[columns.TEMPERATURE] = params.temperature
        row[columns.KEY_LO] = key & 0xFFFFFFFF
        row[columns.KEY_HI] = key >> 32
        row[columns.NUM_PROMPT] = request.num_prompt_tokens
        for needs in self._needs:
            needs[slot] = False
        for name, column, neutral, _, operation in columns.PARAMETERS:
            value = getattr(params, name)
            if neutral is None:
                neutral = self._tables.vocab_size
                value = min(value, neutral) or neutral
            row[column] = value
            if value != neutral:
                self._needs[operation][slot] = True
        return row
