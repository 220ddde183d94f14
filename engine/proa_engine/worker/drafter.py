"""Drafter: speculative decoding with n-gram drafts (prompt lookup decoding), without waiting for the host.

A draft token is accepted where it equals the target model's own sample, as are all before it, so speculation changes no
output. The device keeps every request's true length. Draft tokens are written to the token table before the forward
pass, where attention and penalties read them like any token, and are overwritten by the samples. KV cache entries of
rejected draft tokens are overwritten when the request reaches their positions.
"""

import torch
from torch import Tensor

from proa_engine.kernels.accept_drafts import accept_drafts
from proa_engine.kernels.ngram import NONE, propose_ngrams
from proa_engine.speculative_config import SpeculativeConfig
from proa_engine.worker.draft_inputs import TokenMoves
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.step_inputs import StepInputs, TokenRows


class Drafter:
    """For each step call `begin` before its forward pass, and `accept` after its sampling if it samples."""

    def __init__(self, config: SpeculativeConfig, batch: InputBatch) -> None:
        self._config = config
        self._batch = batch
        num_slots, device = batch.token_ids.shape[0], batch.token_ids.device
        # [slots] int64: tokens of each slot's request, including sampled ones.
        self._lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # [slots, max_drafts] int64: draft tokens of the step, for the slots of its rows; NONE: no draft token.
        self._drafts = torch.full((num_slots, batch.max_drafts), NONE, dtype=torch.int64, device=device)

    def begin(self, inputs: StepInputs, arrays: list[Tensor]) -> None:
        """Note the lengths of new requests and move the step's samples to their true positions, in `arrays`.

        Also does `propose` for TokenRows. For DecodeRows, the graph does.
        """
        drafts, sampling = inputs.drafts, inputs.sampling
        assert drafts is not None
        if drafts.joined is not None:
            self._lengths.index_copy_(0, arrays[drafts.joined[0]], arrays[drafts.joined[1]])
        if sampling is not None:
            slots = arrays[sampling.slots]
            positions = self._lengths.index_select(0, slots) + arrays[drafts.num_before]
            arrays[sampling.positions] = positions
            arrays[sampling.write_to] = torch.add(positions, slots, alpha=self._batch.token_width)
        if drafts.moves is not None:
            assert isinstance(inputs.rows, TokenRows)
            self._move(inputs.rows, drafts.moves, arrays)

    def propose(self, rows: Tensor) -> None:
        """Write draft tokens to the token table and move the rows to their true ends.

        `rows` [3, rows] int64 are slots, ends and numbers of tokens, as `propose_ngrams` takes them. Can be captured.
        """
        propose_ngrams(
            rows,
            self._batch.token_ids,
            self._lengths,
            self._drafts,
            min_ngram=self._config.prompt_lookup_min,
            max_ngram=self._config.prompt_lookup_max,
        )

    def accept(self, inputs: StepInputs, arrays: list[Tensor], token_ids: Tensor) -> Tensor | None:
        """The numbers of accepted and proposed draft tokens, [sampling rows, 2] int64; None if no row may have any.

        `token_ids` [samples] int64 are the step's samples. A row keeps the samples of its accepted draft tokens, which
        come first, and the one after them.
        """
        drafts, sampling = inputs.drafts, inputs.sampling
        assert drafts is not None
        assert sampling is not None
        first_samples = arrays[drafts.first_samples]
        counts = accept_drafts(token_ids, arrays[sampling.slots], first_samples, self._drafts, self._lengths)
        return counts if any(drafts.num_planned) else None

    def _move(self, rows: TokenRows, moves: TokenMoves, arrays: list[Tensor]) -> None:
        """Propose, and move all positions of the batch, in `arrays`."""
        proposed = arrays[moves.rows].view(3, -1)
        self.propose(proposed)
        shift = proposed[1] - arrays[rows.seq_lens]  # [rows]
        arrays[rows.seq_lens] = proposed[1]
        token_rows = arrays[moves.token_rows]
        of_tokens = shift.index_select(0, token_rows)
        positions = arrays[rows.positions] + of_tokens
        arrays[rows.positions] = positions
        if rows.rotary_positions is not None:  # only rows behind all images move, by as much in all three
            arrays[rows.rotary_positions] = (arrays[rows.rotary_positions].view(3, -1) + of_tokens).view(-1)
        arrays[rows.token_positions] = arrays[rows.token_positions] + of_tokens
        first_blocks = arrays[rows.slots].index_select(0, token_rows) * self._batch.max_blocks
        arrays[rows.block_positions] = first_blocks + positions // self._batch.block_size
        arrays[rows.block_offsets] = positions % self._batch.block_size
