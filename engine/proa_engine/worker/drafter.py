"""Drafter: speculative decoding with n-gram drafts (prompt lookup decoding), without waiting for the host.

A draft token is accepted where it equals the target model's own sample, as are all before it, so speculation changes no
output. The device keeps every request's true length. Draft tokens are written to the token table before the forward
pass, where attention and penalties read them like any token, and are overwritten by the samples. KV cache entries of
rejected draft tokens are overwritten when the request reaches their positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proa_engine.kernels.ngram import NONE, propose_ngrams
from proa_engine.speculative_config import SpeculativeConfig
from proa_engine.worker.draft_inputs import DraftedRows, DraftInputs
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.step_inputs import StepInputs, TokenRows


@dataclass(frozen=True, slots=True)
class _Proposed:
    slots: Tensor  # [drafted rows] int64
    drafts: Tensor  # [rows, max_drafts] int64; NONE: no draft token


class Drafter:
    """Call `propose` before each step's forward pass and `accept` after its sampling, if it samples."""

    def __init__(self, config: SpeculativeConfig, batch: InputBatch) -> None:
        self._config = config
        self._batch = batch
        # [slots] int64: tokens of each slot's request, including sampled ones.
        self._lengths = torch.zeros(batch.token_ids.shape[0], dtype=torch.int64, device=batch.token_ids.device)
        self._proposed: _Proposed | None = None

    def propose(self, inputs: StepInputs, arrays: list[Tensor]) -> None:
        """Move the step's rows to their requests' true positions, in `arrays`, and write draft tokens to the table."""
        drafts, rows = inputs.drafts, inputs.rows
        assert drafts is not None
        assert isinstance(rows, TokenRows)
        if drafts.joined is not None:
            self._lengths.index_copy_(0, arrays[drafts.joined[0]], arrays[drafts.joined[1]])
        sampling = arrays[drafts.sampling_rows]
        slots = arrays[rows.slots]
        true_ends = self._lengths.index_select(0, slots[sampling]) + arrays[drafts.num_planned_sampling]
        shift = torch.zeros_like(slots).index_copy_(0, sampling, true_ends - arrays[rows.seq_lens][sampling])
        self._move(inputs, rows, drafts, shift, arrays)
        self._proposed = None if drafts.drafted is None else self._find_drafts(rows, drafts.drafted, arrays)

    def accept(self, inputs: StepInputs, arrays: list[Tensor], token_ids: Tensor) -> Tensor | None:
        """The numbers of accepted and proposed draft tokens, [drafted rows, 2] int64; None if the step has no drafts.

        `token_ids` [samples] int64 are the step's samples. A row keeps the samples of its accepted draft tokens, which
        come first, and the one after them.
        """
        drafts = inputs.drafts
        assert drafts is not None
        assert isinstance(inputs.rows, TokenRows)
        slots = arrays[inputs.rows.slots][arrays[drafts.sampling_rows]]
        self._lengths.index_add_(0, slots, torch.ones_like(slots))
        proposed, drafted = self._proposed, drafts.drafted
        if proposed is None or drafted is None:
            return None
        column = torch.arange(proposed.drafts.shape[1], device=token_ids.device)
        samples = (arrays[drafted.first_sample][:, None] + column).clamp_(max=len(token_ids) - 1)
        is_accepted = (token_ids[samples] == proposed.drafts).cumprod(1)
        num_accepted = is_accepted.sum(1)
        self._lengths.index_add_(0, proposed.slots, num_accepted)
        return torch.stack((num_accepted, (proposed.drafts != NONE).sum(1)), dim=1)

    def _move(
        self, inputs: StepInputs, rows: TokenRows, drafts: DraftInputs, shift: Tensor, arrays: list[Tensor]
    ) -> None:
        """Add `shift` [rows] int64 to each row's positions."""
        token_rows = arrays[drafts.token_rows]
        of_tokens = shift.index_select(0, token_rows)
        positions = arrays[rows.positions] + of_tokens
        arrays[rows.positions] = positions
        arrays[rows.token_positions] = arrays[rows.token_positions] + of_tokens
        first_blocks = arrays[rows.slots].index_select(0, token_rows) * self._batch.max_blocks
        arrays[rows.block_positions] = first_blocks + positions // self._batch.block_size
        arrays[rows.block_offsets] = positions % self._batch.block_size
        arrays[rows.seq_lens] = arrays[rows.seq_lens] + shift
        if inputs.sampling is not None:
            of_samples = shift.index_select(0, arrays[drafts.sample_rows])
            for index in (inputs.sampling.positions, inputs.sampling.write_to):
                arrays[index] = arrays[index] + of_samples

    def _find_drafts(self, rows: TokenRows, drafted: DraftedRows, arrays: list[Tensor]) -> _Proposed:
        slots = arrays[rows.slots].index_select(0, arrays[drafted.rows])
        drafts = propose_ngrams(
            self._batch.token_ids,
            slots,
            self._lengths,
            arrays[drafted.num_planned],
            width=self._config.num_speculative_tokens,
            max_length=rows.max_seq_len,
            min_ngram=self._config.prompt_lookup_min,
            max_ngram=self._config.prompt_lookup_max,
        )
        # A row may have fewer draft tokens than planned: token 0 fills the rest, is computed and never accepted.
        tokens = drafts.view(-1).index_select(0, arrays[drafted.cells]).clamp(min=0).int()
        positions = arrays[rows.token_positions].index_select(0, arrays[drafted.tokens])
        self._batch.token_ids.view(-1).index_copy_(0, positions, tokens)
        return _Proposed(slots, drafts)
