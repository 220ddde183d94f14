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

    def logits(
        self, slots: Tensor, lengths: Tensor, room: Tensor, num_drafts: int, drafted: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        tables, first = self._tables, 0 if self._drafter.samples_last else 1  # place of the first draft in the block
        # Equally wide for any number of drafts: each width is a variant of kernels, compiled when it is first launched.
        width, has_room = self._drafts.shape[1] + first, (room > 0).long()
        counts = (room + first) * has_room
        rows = torch.stack((slots, (lengths - 1) * has_room + counts, counts))
        inputs = decode_inputs(
            rows, tables.token_ids, tables.block_tables, tables.block_size, width, tables.position_deltas
        )
        before = (width - counts)[:, None]  # padding before each block, which begins with the last token
        places = torch.arange(width, device=slots.device)
        token_ids = inputs.input_ids.masked_fill_((places > before).view(-1), self._drafter.mask_token_id)
        hidden = self._drafter.draft(token_ids, inputs.positions, self._caches, decode_metadata(inputs, width))
        of_drafts = (before + first + places[:num_drafts]).clamp(max=width - 1)
        starts = torch.arange(0, slots.numel() * width, width, device=slots.device)
        hidden = hidden.index_select(0, (of_drafts + starts[:, None]).view(-1))
        logits = self._drafter.compute_logits(hidden).view(len(slots), num_drafts, -1)
        last_ids = token_ids.view(-1, width).gather(1, before.clamp(max=width - 1))[:, 0]
        for place in range(num_drafts):
            yield self._drafter.follow(logits[:, place], drafted[-1] if place else last_ids)

    def observe(
        self, forward: ForwardInputs, hidden: Tensor, slots: Tensor, homes: Tensor, next_positions: Tensor
    ) -> None:
        self._drafter.observe(*self.states_of(forward, hidden), self._caches, forward.metadata)
