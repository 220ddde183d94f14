"""BlockDrafts: drafts of layers that propose a block of tokens at once (`models.drafters.base.BlockDrafter`).

A row's block is its request's last token, whose entry the step's end will compute, and masks at the places of the draft
tokens, as many as the row has room for. Its keys and values are written to the slots of these places, which the plan
has for the step that verifies the drafts: that step's end overwrites them with the entries. An entry is made of one
state alone, so a cached block's entries are right for every request that hits it, and a request has drafts from its
first step with room on.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from proa_engine.kernels.sampling.decode_inputs import decode_inputs
from proa_engine.kernels.sampling.draft_state import DraftPlace, DraftRows
from proa_engine.layers.attention_metadata import decode_metadata
from proa_engine.layers.cache_layers import LayerCache
from proa_engine.models.drafters.base import BlockDrafter
from proa_engine.step.columns import ForwardInputs
from proa_engine.step.hidden_drafts import HiddenDraftOptions, HiddenDrafts
from proa_engine.step.slots import SlotTables


class BlockDrafts(HiddenDrafts):
    def __init__(
        self, tables: SlotTables, drafter: BlockDrafter, caches: Sequence[LayerCache], options: HiddenDraftOptions
    ) -> None:
        """`caches` are of the drafter's layers."""
        super().__init__(tables, drafter.taps, options)
        self._drafter, self._caches = drafter, caches

    def logits(self, rows: DraftRows, places: Sequence[DraftPlace], num_drafts: int) -> Iterator[Tensor]:
        tables, first = self._tables, 0 if self._drafter.samples_last else 1  # place of the first draft in the block
        # Equally wide for any number of drafts: each width is a variant of kernels, compiled when it is first launched.
        width, has_room = self._drafts.shape[1] + first, (rows.room > 0).long()
        counts = (rows.room + first) * has_room
        blocks = torch.stack((rows.slots, (rows.lengths - 1) * has_room + counts, counts))
        inputs = decode_inputs(
            blocks, tables.token_ids, tables.block_tables, tables.block_size, width, tables.position_deltas
        )
        before = (width - counts)[:, None]  # padding before each block, which begins with the last token
        columns = torch.arange(width, device=before.device)
        token_ids = inputs.input_ids.masked_fill_((columns > before).view(-1), self._drafter.mask_token_id)
        hidden = self._drafter.draft(token_ids, inputs.positions, self._caches, decode_metadata(inputs, width))
        of_drafts = (before + first + columns[:num_drafts]).clamp(max=width - 1)
        hidden = hidden.index_select(0, (of_drafts + (rows.index * width)[:, None]).view(-1))
        logits = self._drafter.compute_logits(hidden).view(len(before), num_drafts, -1)
        for index in range(num_drafts):
            yield self._drafter.follow(logits[:, index], places[index].token_ids)

    def observe(self, forward: ForwardInputs, hidden: Tensor, slots: Tensor, next_ids: Tensor) -> None:
        self._drafter.observe(*self.states_of(forward, hidden), self._caches, forward.metadata)
