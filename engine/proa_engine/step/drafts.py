"""DraftColumns: speculative decoding without waiting for the host; NgramDrafts: with n-gram drafts (prompt lookup
decoding).

A draft token is accepted if it and all drafts before it equal the target model's own samples, so speculation changes no
output. The device keeps every request's true length: the host lays a step out as if every draft token in flight had
been accepted, and the device moves its rows to their requests' true ends. Draft tokens are written to the token table
before the forward pass, where attention and penalties read them like any token, and are overwritten by the samples. KV
cache entries of rejected draft tokens are overwritten when the request reaches their positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proa_engine.core.types import Drafts, NewRequestData
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.kernels.sampling.drafts import NONE, accept_drafts, propose_ngrams
from proa_engine.kernels.sampling.sampling_params import MIN_TEMPERATURE
from proa_engine.step.columns import Columns, Computed, Rows, Samples, StepLayout, StepOutputs, StepPart, TokenRows
from proa_engine.step.decode_graphs import GraphShape, pad_rows
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import DraftCopy, Packer


@dataclass(frozen=True, slots=True)
class TokenMoves:
    """Staged indices that correct the positions of a batch of TokenRows."""

    of: TokenRows
    rows: int  # [3 * rows], as `propose_ngrams` takes them
    token_rows: int  # [tokens]: the step's row of each token
    drafting: int  # [rows with drafts]: the step's rows that may have draft tokens
    random: int  # those of them with a temperature, as indices of `drafting`
    num_drafts: int  # the most of a row


@dataclass(frozen=True, slots=True)
class DraftPart(StepPart):
    """A step's draft tokens: a row samples after each of them, and after the token before them."""

    columns: "DraftColumns"
    request_ids: list[str]  # by row
    num_samples: list[int]  # by row, at most: the device may propose fewer drafts than the step has room for
    samples: Samples | None
    first_samples: int  # staged index: [sampling rows]
    num_before: int  # staged index: [samples], samples of the row before each
    moves: TokenMoves | None  # None: a graph computes the positions
    draft_copies: Sequence[DraftCopy]  # of rows under a grammar

    def before_forward(self, arrays: list[Tensor]) -> None:
        """Move the step's samples and tokens to their true positions. A graph proposes the draft tokens of its rows."""
        if self.samples is not None:
            self.columns.move_samples(self.samples, self.num_before, arrays)
        if self.moves is not None:
            self.columns.move_tokens(self.moves, arrays)
            self._copy_drafts(arrays)

    def after_replay(self, arrays: Sequence[Tensor]) -> None:
        self._copy_drafts(arrays)

    def after_sample(self, arrays: Sequence[Tensor], computed: Computed, token_ids: Tensor | None) -> list[Tensor]:
        """Return the numbers of accepted and proposed draft tokens, [sampling rows, 2] int64; nothing if no row has
        drafts."""
        if self.samples is None or token_ids is None:
            return []
        counts = self.columns.accept(token_ids, arrays[self.samples.slots], arrays[self.first_samples])
        return [counts] if any(count > 1 for count in self.num_samples) else []

    @property
    def sampling_rows(self) -> list[int]:
        return [row for row, num_samples in enumerate(self.num_samples) if num_samples]

    def add_results(self, results: list[Tensor], outputs: StepOutputs) -> None:
        (counts,) = results
        for row, (num_accepted, num_proposed) in zip(self.sampling_rows, counts.tolist(), strict=True):
            outputs.num_kept[row] = num_accepted + 1
            if (num_planned := self.num_samples[row] - 1) > 0:
                outputs.others[self.request_ids[row]].drafts = Drafts(num_planned, num_proposed)

    def _copy_drafts(self, arrays: Sequence[Tensor]) -> None:
        for draft_copy in self.draft_copies:
            draft_copy.start(self.columns.drafts_in(arrays[draft_copy.slots]))


class DraftColumns(Columns):
    """Drafts by slot. A method of speculation is a derived class with `propose`."""

    adds_drafts = True

    def __init__(self, tables: SlotTables, max_drafts: int) -> None:
        self._tables = tables
        self._is_random = np.zeros(tables.num_slots, bool)
        num_slots, device = tables.num_slots, tables.device
        # [slots] int64: tokens of each slot's request, including sampled ones.
        self._lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # [slots + 1, drafts of a step] int64: draft tokens of the step, for the slots of its rows; NONE: no draft
        # token. The last row is of a graph's padding.
        self._drafts = torch.full((num_slots + 1, max_drafts), NONE, dtype=torch.int64, device=device)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        edits.write(self._lengths, (slot,), (len(request.token_ids),))
        self._is_random[slot] = request.sampling_params.temperature >= MIN_TEMPERATURE

    def set_length(self, slot: int, num_tokens: int, edits: Edits) -> None:
        edits.write(self._lengths, (slot,), (num_tokens,))

    def lay_out_part(self, step: StepLayout, packer: Packer) -> StepPart:
        return self.lay_out_drafts(step, packer)

    def lay_out_drafts(self, step: StepLayout, packer: Packer) -> DraftPart:
        rows = step.rows
        num_samples = rows.num_samples[rows.num_samples > 0]
        first_samples = np.cumsum(num_samples) - num_samples
        num_before = np.arange(num_samples.sum()) - np.repeat(first_samples, num_samples)
        constrained = [row for row in step.plan.grammar_rows if rows.num_samples[row] > 1]
        copies = [DraftCopy(constrained, packer.add(rows.slots[constrained]))] if constrained else []
        return DraftPart(
            columns=self,
            request_ids=rows.request_ids,
            num_samples=rows.num_samples.tolist(),
            samples=step.samples,
            first_samples=packer.add(first_samples),
            num_before=packer.add(num_before),
            moves=None if step.token_rows is None else self._token_moves(rows, step.token_rows, packer),
            draft_copies=copies,
        )

    def propose(self, rows: Tensor, drafting: Tensor, random: Tensor, num_drafts: int) -> None:
        """Write draft tokens to the token table and to `_drafts`, and move the rows to their requests' true ends.

        `rows` [3, rows] are as `propose_ngrams` takes them. `drafting` [rows with drafts] int64 are those that may have
        draft tokens, at most `num_drafts`, and `random` the indices in `drafting` of those with a temperature.
        """
        raise NotImplementedError

    def drafts_in(self, slots: Tensor) -> Tensor:
        """Return the draft tokens that are proposed for these slots, [slots, drafts] int64; NONE stands for none."""
        return self._drafts.index_select(0, slots)

    def move_samples(self, samples: Samples, num_before: int, arrays: list[Tensor]) -> None:
        """Move samples to their true positions, in the step's staged `arrays`."""
        slots = arrays[samples.slots]
        positions = self._lengths.index_select(0, slots) + arrays[num_before]
        arrays[samples.positions] = positions
        arrays[samples.write_to] = torch.add(positions, slots, alpha=self._tables.token_width)

    def move_tokens(self, moves: TokenMoves, arrays: list[Tensor]) -> None:
        """Propose the draft tokens of a batch, and move all its positions in the step's staged `arrays`."""
        rows, proposed = moves.of, arrays[moves.rows].view(3, -1)
        self.propose(proposed, arrays[moves.drafting], arrays[moves.random], moves.num_drafts)
        shift = proposed[1] - arrays[rows.seq_lens]  # [rows]
        arrays[rows.seq_lens] = proposed[1]
        token_rows = arrays[moves.token_rows]
        of_tokens = shift.index_select(0, token_rows)
        positions = arrays[rows.positions] + of_tokens
        arrays[rows.positions] = positions
        arrays[rows.token_positions] = arrays[rows.token_positions] + of_tokens
        first_blocks = arrays[rows.slots].index_select(0, token_rows) * self._tables.max_blocks
        arrays[rows.block_positions] = first_blocks + positions // self._tables.block_size
        arrays[rows.block_offsets] = positions % self._tables.block_size

    def accept(self, token_ids: Tensor, slots: Tensor, first_samples: Tensor) -> Tensor:
        """Return the numbers of accepted and proposed draft tokens, [sampling rows, 2] int64, and store their requests'
        true lengths.

        `token_ids` and `slots` [samples] int64 are of the step's samples, `first_samples` [sampling rows] the first of
        each row. A row keeps the samples of its accepted draft tokens, which come first, and the one after them.
        """
        return accept_drafts(token_ids, slots, first_samples, self._drafts, self._lengths)

    def _token_moves(self, rows: Rows, token_rows: TokenRows, packer: Packer) -> TokenMoves:
        counts, num_drafts = rows.counts, np.maximum(rows.num_samples - 1, 0)
        drafting = np.flatnonzero(num_drafts)
        return TokenMoves(
            of=token_rows,
            rows=packer.add(pad_rows(rows.slots, rows.ends, np.maximum(rows.num_samples, 1), counts.size)),
            token_rows=packer.add(np.repeat(np.arange(counts.size), counts)),
            drafting=packer.add(drafting),
            random=packer.add(np.flatnonzero(self._is_random[rows.slots[drafting]])),
            num_drafts=int(num_drafts.max()),
        )


class NgramDrafts(DraftColumns):
    """Drafts that followed the request's last tokens earlier in it."""

    def __init__(self, tables: SlotTables, config: SpeculativeConfig) -> None:
        super().__init__(tables, config.max_drafts)
        self._config = config

    def before_decodes(self, columns: Tensor, shape: GraphShape) -> None:
        self._propose(columns[:3])

    def propose(self, rows: Tensor, drafting: Tensor, random: Tensor, num_drafts: int) -> None:
        self._propose(rows)

    def _propose(self, rows: Tensor) -> None:
        """Can be captured."""
        propose_ngrams(
            rows,
            self._tables.token_ids,
            self._lengths,
            self._drafts,
            min_ngram=self._config.prompt_lookup_min,
            max_ngram=self._config.prompt_lookup_max,
        )
