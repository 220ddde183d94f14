"""HiddenDrafts: speculative decoding with a drafter that reads the model's hidden states, on the device alone;
LayerDrafts: with one layer that proposes one token after another. `block_drafts` has the other kind.

Entries of the drafter are those of `models.drafters.base`. The end of a step stores those of all its tokens
(`observe`), whose next tokens are known by then: of the prompt, or sampled. The beginning of the next step proposes as
many tokens as the plan has room for (`propose`): no draft is computed for a request that has ended or in a step without
drafts, and the block tables are those of the step that verifies the drafts. Entries of drafts, and of tokens behind
rejected ones, are overwritten when the request reaches their positions, as the model's keys are. So chunks, preemption
and prefix hits need no rule: an entry needs one state alone.

Where decodes are replayed as graphs, one has the proposals and the model's layers, and a second one the entries,
because the tokens are sampled and accepted between the two. Padding rows read slot 0 and write a slot of their own.

vLLM computes drafts at the end of the step before. It then needs slots ahead of the plan, keeps drafts across steps,
and drops the last block of every prefix hit. Here such a block is kept whole: its last entry was made with the token
behind it in another request, which can lower the share of accepted drafts and changes no output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proa_engine.core.speculation import RANGES, TEMPERATURES, Way
from proa_engine.core.types import NewRequestData
from proa_engine.kernels.sampling.decode_inputs import decode_inputs
from proa_engine.kernels.sampling.draft_ends import compare_drafts, keep_reads, next_token_ids
from proa_engine.kernels.sampling.draft_rows import add_drafts, begin_drafts, settle_rows
from proa_engine.kernels.sampling.draft_state import DraftPlace, DraftRows, DraftState
from proa_engine.kernels.sampling.drafts import NONE
from proa_engine.kernels.sampling.draw_tokens import draw_tokens, draw_tokens_reference
from proa_engine.kernels.sampling.sampling_params import MIN_P, TEMPERATURE, TOP_K, TOP_P
from proa_engine.layers.attention_metadata import Taps, decode_metadata
from proa_engine.layers.cache_layers import LayerCache
from proa_engine.models.drafters.base import Entries, HiddenDrafter
from proa_engine.step.columns import (
    Computed,
    ForwardInputs,
    Replayed,
    Rows,
    StepLayout,
    StepOutputs,
    StepPart,
    TokenRows,
)
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.drafts import DraftColumns, DraftPart
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import DraftCopy, Packer

_WAY_IN_USE = -1  # of `DraftRows.params`


@dataclass(frozen=True, slots=True)
class TapInputs:
    """What a step's layers keep for the drafter."""

    layers: tuple[int, ...]
    size: int  # values of a state
    dtype: torch.dtype

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        num_tokens, device = forward.positions.shape[-1], forward.positions.device
        states = torch.empty(num_tokens, len(self.layers) * self.size, dtype=self.dtype, device=device)
        forward.metadata.taps = Taps(self.layers, states)


@dataclass(frozen=True, slots=True)
class HiddenDraftPart(StepPart):
    """A step's draft tokens, and the drafter's entries of its tokens."""

    columns: "HiddenDrafts"
    drafts: DraftPart
    rows: TokenRows | None  # None: a graph computes the positions of the step's tokens

    @property
    def draft_copies(self) -> Sequence[DraftCopy]:
        return self.drafts.draft_copies

    def before_forward(self, arrays: list[Tensor]) -> None:
        self.drafts.before_forward(arrays)

    def after_replay(self, arrays: Sequence[Tensor]) -> None:
        self.drafts.after_replay(arrays)

    def after_sample(self, arrays: Sequence[Tensor], computed: Computed, token_ids: Tensor | None) -> list[Tensor]:
        """Also return which ways to draw would have proposed the first sample, [sampling rows, ways] int64, if any row
        has drafts."""
        results = self.drafts.after_sample(arrays, computed, token_ids)
        if results and self.drafts.samples and isinstance(token_ids, Tensor):
            slots, first_samples = arrays[self.drafts.samples.slots], arrays[self.drafts.first_samples]
            results.append(self.columns.compare(token_ids, slots, first_samples))
        match computed.forward:
            case Replayed() as replayed:
                replayed.run_rest()
            case ForwardInputs() as forward:
                assert isinstance(self.rows, TokenRows), "its tokens are laid out"
                next_ids = self.columns.token_ids_at(arrays[self.rows.token_positions] + 1)
                self.columns.observe(forward, computed.hidden, arrays[self.rows.slots], next_ids)
        return results

    def add_results(self, results: list[Tensor], outputs: StepOutputs) -> None:
        counts, matches = results
        self.drafts.add_results([counts], outputs)
        for row, by_way in zip(self.drafts.sampling_rows, matches.tolist(), strict=True):
            output = outputs.others.get(self.drafts.request_ids[row])
            if output and output.drafts and output.drafts.proposed:
                output.drafts = output.drafts._replace(matches=by_way)


@dataclass(frozen=True, slots=True)
class HiddenDraftOptions:
    max_drafts: int
    ways: Sequence[Way]
    params: Tensor  # the slots' sampling parameters (`sampling_params`)
    state_size: int  # values of a state of the model
    dtype: torch.dtype  # of states


class HiddenDrafts(DraftColumns):
    """Drafts by slot. A kind of drafter is a derived class with `logits` and `observe`."""

    follows_decodes = True

    def __init__(self, tables: SlotTables, taps: tuple[int, ...], options: HiddenDraftOptions) -> None:
        super().__init__(tables, options.max_drafts)
        self._taps = TapInputs(taps, options.state_size, options.dtype)
        ways, num_rows, device = options.ways, tables.num_slots + 1, tables.device
        self._state = DraftState(
            token_ids=tables.token_ids,
            lengths=self._lengths,
            can_draft=torch.ones(num_rows, dtype=torch.int64, device=device),
            drafts=self._drafts,
            first=torch.full((num_rows, len(ways)), NONE, dtype=torch.int64, device=device),
            params=options.params,
            factors=torch.tensor([way.factor for way in ways], dtype=torch.float64, device=device),
            bounds=torch.tensor(TEMPERATURES, dtype=torch.float64, device=device),
            matches=torch.zeros(len(RANGES), len(ways), dtype=torch.float64, device=device),
        )
        self._graph_taps = torch.empty(0, device=device)  # what graphs leave for the drafter; they share it

    def logits(self, rows: DraftRows, places: Sequence[DraftPlace], num_drafts: int) -> Iterator[Tensor]:
        """Yield the logits [rows, vocab_size] of `num_drafts` places, each when `places` has it. Of rows that have no
        room there: any."""
        raise NotImplementedError

    def observe(self, forward: ForwardInputs, hidden: Tensor, slots: Tensor, next_ids: Tensor) -> None:
        """Compute the entries of a step's tokens, behind which are `next_ids` [tokens] int64. `slots` are the rows',
        and `hidden` is the model's result."""
        raise NotImplementedError

    def lay_out(self, rows: Rows, packer: Packer) -> TapInputs | None:
        return self._taps if self._taps.layers else None

    def lay_out_part(self, step: StepLayout, packer: Packer) -> StepPart:
        return HiddenDraftPart(self, self.lay_out_drafts(step, packer), step.token_rows)

    def before_decodes(self, columns: Tensor, shape: GraphShape) -> None:
        settle_rows(columns[:3], self._state)
        if shape.width > 1:
            self._draft(columns[:3], shape.width - 1, is_random=True)

    def fill_decodes(self, forward: ForwardInputs, columns: Tensor, shape: GraphShape) -> None:
        if not self._taps.layers:
            return
        if len(self._graph_taps) < shape.num_tokens:  # the largest shape is the first
            self._taps.fill(forward, ())
            self._graph_taps = forward.metadata.taps.states
        forward.metadata.taps = Taps(self._taps.layers, self._graph_taps[: shape.num_tokens])

    def after_decodes(self, columns: Tensor, shape: GraphShape, hidden: Tensor) -> Tensor:
        tables, rows = self._tables, columns[:3]
        inputs = decode_inputs(
            rows, tables.token_ids, tables.block_tables, tables.block_size, shape.width, tables.position_deltas
        )
        forward = ForwardInputs(inputs.input_ids, inputs.positions, decode_metadata(inputs, shape.width))
        self.fill_decodes(forward, columns, shape)
        next_ids = next_token_ids(rows, tables.token_ids, shape.width)
        self.observe(forward, hidden, rows[0], next_ids)
        return next_ids

    def propose(self, rows: Tensor, drafting: Tensor, random: Tensor, num_drafts: int) -> None:
        settle_rows(rows, self._state)
        if num_drafts:
            self._draft(rows.index_select(1, drafting), num_drafts, is_random=random.numel() > 0)

    def compare(self, token_ids: Tensor, slots: Tensor, first_samples: Tensor) -> Tensor:
        """Count which ways would have proposed the first sample of each row, as `compare_drafts`."""
        return compare_drafts(token_ids, slots, first_samples, self._state)

    def token_ids_at(self, places: Tensor) -> Tensor:
        """Return the ids at places [tokens] int64 of the token table, in which -1 stands for an embedding."""
        return self._tables.flat_token_ids.index_select(0, places).clamp(min=0).long()

    def states_of(self, forward: ForwardInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a step's layers left for the drafter, and the positions of its tokens, [tokens] int64."""
        taps, positions = forward.metadata.taps, forward.positions
        return taps.states if taps.layers else hidden, positions if positions.dim() == 1 else positions[0]

    def _draft(self, rows: Tensor, num_drafts: int, *, is_random: bool) -> None:
        """Propose draft tokens of rows [3, rows] at their true ends. `is_random`: some row has a temperature."""
        drafting, first = begin_drafts(rows, self._state)
        places = [first]
        for place, logits in enumerate(self.logits(drafting, places, num_drafts)):
            ways = range(len(self._state.factors)) if is_random and not place else (_WAY_IN_USE,)
            drawn = [self._choose(drafting, logits, places[place], way, is_random=is_random) for way in ways]
            by_way = torch.stack(drawn) if len(drawn) > 1 else drawn[0][None]
            places.append(add_drafts(by_way, place, drafting, self._state, are_ways=not place))

    def _choose(self, rows: DraftRows, logits: Tensor, place: DraftPlace, way: int, *, is_random: bool) -> Tensor:
        """Return the token that each row of logits proposes for its place, [rows] int64: the likeliest. If any row
        `is_random`, rows with a temperature draw as their requests' samples are drawn, with the same noise and among
        the tokens that the limits allow."""
        params, is_host = rows.params[way], self._state.is_host
        if not is_random or (is_host and not params[:, TEMPERATURE].any()):
            return logits.argmax(dim=-1)
        if is_host:
            limited = (params[:, TOP_K] < logits.shape[1]) | (params[:, TOP_P] < 1) | (params[:, MIN_P] > 0)
            return draw_tokens_reference(logits, params, rows.index, place.positions, has_limits=bool(limited.any()))
        return draw_tokens(logits, params, rows.index, place.positions, has_limits=True)  # rows without return at once


class LayerDrafts(HiddenDrafts):
    """With a `HiddenDrafter`. What a request's last entry reads stays with its slot: the first draft token is computed
    from it. So a step without drafts computes no more of the drafter's layer than the entries. A request can have
    drafts when its first step has ended."""

    def __init__(
        self, tables: SlotTables, drafter: HiddenDrafter, caches: Sequence[LayerCache], options: HiddenDraftOptions
    ) -> None:
        """`caches` are of the drafter's layers."""
        super().__init__(tables, drafter.taps, options)
        self._drafter, self._caches = drafter, caches
        # [slots + 1, read_size]: what a request's last entry reads; another request's until its slot can have drafts.
        self._carry = torch.zeros(tables.num_slots + 1, drafter.read_size, dtype=options.dtype, device=tables.device)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        super().add(request, slot, edits)
        edits.write(self._state.can_draft, (slot,), (0,))

    def logits(self, rows: DraftRows, places: Sequence[DraftPlace], num_drafts: int) -> Iterator[Tensor]:
        tables, read = self._tables, self._carry.index_select(0, rows.slots)
        for index in range(num_drafts):
            place = places[index]
            inputs = decode_inputs(
                place.entries, tables.token_ids, tables.block_tables, tables.block_size, 1, tables.position_deltas
            )
            entries = Entries(read, place.token_ids, inputs.positions)
            read = self._drafter(entries, self._caches, decode_metadata(inputs))
            yield self._drafter.compute_logits(read)

    def observe(self, forward: ForwardInputs, hidden: Tensor, slots: Tensor, next_ids: Tensor) -> None:
        """Also keep what the entries of the rows' last true tokens read."""
        metadata, (states, positions) = forward.metadata, self.states_of(forward, hidden)
        read = self._drafter.combine(states)
        self._drafter.observe(Entries(read, next_ids, positions), self._caches, metadata)
        keep_reads(read, slots, metadata.query_start_loc, metadata.seq_lens, self._state, self._carry)
