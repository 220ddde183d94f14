"""DraftColumns: speculative decoding with n-gram drafts (prompt lookup decoding), without waiting for the host.

A draft token is accepted if it and all drafts before it equal the target model's own samples, so speculation changes no
output. The device keeps every request's true length: the host lays a step out as if every draft token in flight had
been accepted, and the device moves its rows to their requests' true ends. Draft tokens are written to the token table
before the forward pass, where attention and penalties read them like any token, and are overwritten by the samples. KV
cache entries of rejected draft tokens are overwritten when the request reaches their positions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proa_engine.core.types import NewRequestData
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.kernels.sampling.drafts import NONE, accept_drafts, propose_ngrams
from proa_engine.step.columns import Columns, Rows, Samples, TokenRows
from proa_engine.step.decode_graphs import pad_rows
from proa_engine.step.sampling import SamplingInputs
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """A step's draft tokens: staged indices and host values. A row that samples is a decode or a prompt's last
    chunk."""

    num_planned: list[int]  # draft tokens of each of the step's rows, at most
    first_samples: int  # [sampling rows]
    num_before: int  # [samples]: samples of the row before each
    moves: "TokenMoves | None"  # None: a graph computes the positions


@dataclass(frozen=True, slots=True)
class TokenMoves:
    """Staged indices that correct the positions of a batch of TokenRows."""

    rows: int  # [3 * rows], as `propose_ngrams` takes them
    token_rows: int  # [tokens]: the step's row of each token


class DraftColumns(Columns):
    """Drafts by slot. For each step call `begin` before its forward pass, and `accept` after its sampling if it
    samples."""

    def __init__(self, tables: SlotTables, config: SpeculativeConfig) -> None:
        self._tables = tables
        self._config = config
        num_slots, device = tables.num_slots, tables.device
        # [slots] int64: tokens of each slot's request, including sampled ones.
        self._lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # [slots, drafts of a step] int64: draft tokens of the step, for the slots of its rows; NONE: no draft token.
        shape = num_slots, config.num_speculative_tokens
        self._drafts = torch.full(shape, NONE, dtype=torch.int64, device=device)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        edits.write(self._lengths, (slot,), (len(request.token_ids),))

    def count_planned(self, rows: Rows) -> IntArray:
        """Return the maximum number of draft tokens of each row, [rows]: what a decode computes beside its last known
        token."""
        num_tokens = self._tables.num_tokens[rows.slots]
        is_decode = (rows.ends >= num_tokens) & (rows.starts + 1 >= num_tokens)
        return np.where(is_decode, rows.counts - 1, 0)

    def lay_out_samples(
        self, rows: Rows, sampled: IntArray, num_planned: IntArray, moves: TokenMoves | None, packer: Packer
    ) -> tuple[DraftInputs, Samples]:
        """Return a step's drafts and the samples of its rows `sampled`: one after each draft token and one after the
        token before them."""
        num_samples = num_planned[sampled] + 1
        sample_rows = np.repeat(sampled, num_samples)
        first_samples = np.cumsum(num_samples) - num_samples
        num_before = np.arange(sample_rows.size) - np.repeat(first_samples, num_samples)
        inputs = DraftInputs(num_planned.tolist(), packer.add(first_samples), packer.add(num_before), moves)
        num_after = num_planned[sample_rows] - num_before
        samples = Samples(
            rows=sample_rows,
            positions=rows.ends[sample_rows] - num_after,
            hidden_rows=rows.query_start_loc[1:][sample_rows] - 1 - num_after,
        )
        return inputs, samples

    def begin(
        self, inputs: DraftInputs, sampling: SamplingInputs | None, rows: TokenRows | None, arrays: list[Tensor]
    ) -> None:
        """Move the step's samples to their true positions, in the step's staged `arrays`.

        Also calls `propose` for TokenRows. `rows` None: a CUDA graph calls it.
        """
        if sampling is not None:
            slots = arrays[sampling.slots]
            positions = self._lengths.index_select(0, slots) + arrays[inputs.num_before]
            arrays[sampling.positions] = positions
            arrays[sampling.write_to] = torch.add(positions, slots, alpha=self._tables.token_width)
        if rows is not None:
            assert inputs.moves is not None
            self._move(rows, inputs.moves, arrays)

    def propose(self, rows: Tensor) -> None:
        """Write draft tokens to the token table and move the rows to their true ends.

        `rows` [3, rows] int64 are slots, ends and numbers of tokens, as `propose_ngrams` takes them. Can be captured.
        """
        propose_ngrams(
            rows,
            self._tables.token_ids,
            self._lengths,
            self._drafts,
            min_ngram=self._config.prompt_lookup_min,
            max_ngram=self._config.prompt_lookup_max,
        )

    def accept(
        self, inputs: DraftInputs, sampling: SamplingInputs, arrays: list[Tensor], token_ids: Tensor
    ) -> Tensor | None:
        """Return the numbers of accepted and proposed draft tokens, [sampling rows, 2] int64; None if no row has
        drafts.

        `token_ids` [samples] int64 are the step's samples. A row keeps the samples of its accepted draft tokens, which
        come first, and the one after them.
        """
        first_samples = arrays[inputs.first_samples]
        counts = accept_drafts(token_ids, arrays[sampling.slots], first_samples, self._drafts, self._lengths)
        return counts if any(inputs.num_planned) else None

    def _move(self, rows: TokenRows, moves: TokenMoves, arrays: list[Tensor]) -> None:
        """Call `propose`, and move all positions of the batch in `arrays`."""
        proposed = arrays[moves.rows].view(3, -1)
        self.propose(proposed)
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


def token_moves(rows: Rows, num_planned: IntArray, packer: Packer) -> TokenMoves:
    counts = rows.counts
    return TokenMoves(
        rows=packer.add(pad_rows(rows.slots, rows.ends, 1 + num_planned, counts.size)),
        token_rows=packer.add(np.repeat(np.arange(counts.size), counts)),
    )
