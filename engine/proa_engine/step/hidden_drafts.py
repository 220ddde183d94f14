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
from proa_engine.kernels.launch import INTERPRETED
from proa_engine.kernels.sampling.decode_inputs import decode_inputs
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

_DECAY = 0.999  # of the counts of `HiddenDrafts._matches`, by step with drafts


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
            results.append(self.columns.compare(*self.drafts.first_samples_of(arrays, self.drafts.samples, token_ids)))
        match computed.forward:
            case Replayed() as replayed:
                replayed.run_rest()
            case ForwardInputs() as forward:
                assert isinstance(self.rows, TokenRows), "its tokens are laid out"
                slots, next_positions = arrays[self.rows.slots], arrays[self.rows.token_positions] + 1
                self.columns.observe(forward, computed.hidden, slots, slots, next_positions)
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
        self._params, ways = options.params, options.ways
        num_slots, device = tables.num_slots, tables.device
        self._padding = num_slots  # the slot that padding rows write
        self._factors = torch.tensor([way.factor for way in ways], dtype=torch.float64, device=device)
        self._ranges = torch.tensor(TEMPERATURES, dtype=torch.float64, device=device)
        # [slots + 1, ways] int64: what each way proposes as the first draft token of the step
        self._first = torch.full((num_slots + 1, len(ways)), NONE, dtype=torch.int64, device=device)
        # [ranges of temperatures, ways]: how often each was the sample, of late
        self._matches = torch.zeros(len(RANGES), len(ways), dtype=torch.float64, device=device)
        self._graph_taps = torch.empty(0, device=device)  # what graphs leave for the drafter; they share it

    def logits(
        self, slots: Tensor, lengths: Tensor, room: Tensor, num_drafts: int, drafted: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield the logits [rows, vocab_size] of `num_drafts` places, each when `drafted` has the draft tokens [rows]
        int64 of those before. `room` [rows] are the numbers of draft tokens that the rows can have; other places have
        any logits."""
        raise NotImplementedError

    def observe(
        self, forward: ForwardInputs, hidden: Tensor, slots: Tensor, homes: Tensor, next_positions: Tensor
    ) -> None:
        """Compute the entries of a step's tokens, behind which are those at `next_positions` [tokens] of the token
        table. `slots` are the rows', `homes` those that they write, and `hidden` is the model's result."""
        raise NotImplementedError

    def room(self, slots: Tensor, counts: Tensor) -> Tensor:
        """Return how many draft tokens each of these rows of `counts` tokens can have, [rows] int64."""
        return counts - 1

    def lay_out(self, rows: Rows, packer: Packer) -> TapInputs | None:
        return self._taps if self._taps.layers else None

    def lay_out_part(self, step: StepLayout, packer: Packer) -> StepPart:
        return HiddenDraftPart(self, self.lay_out_drafts(step, packer), step.token_rows)

    def before_decodes(self, columns: Tensor, shape: GraphShape) -> None:
        rows = torch.arange(shape.num_rows, device=columns.device)
        self.propose(columns[:3], rows, rows, shape.width - 1)

    def fill_decodes(self, forward: ForwardInputs, columns: Tensor, shape: GraphShape) -> None:
        if not self._taps.layers:
            return
        if len(self._graph_taps) < shape.num_tokens:  # the largest shape is the first
            self._taps.fill(forward, ())
            self._graph_taps = forward.metadata.taps.states
        forward.metadata.taps = Taps(self._taps.layers, self._graph_taps[: shape.num_tokens])

    def after_decodes(self, columns: Tensor, shape: GraphShape, hidden: Tensor) -> Tensor:
        tables, rows = self._tables, columns[:3]
        slots, ends, counts = rows
        inputs = decode_inputs(
            rows, tables.token_ids, tables.block_tables, tables.block_size, shape.width, tables.position_deltas
        )
        forward = ForwardInputs(inputs.input_ids, inputs.positions, decode_metadata(inputs, shape.width))
        self.fill_decodes(forward, columns, shape)
        behind = ends[:, None] - torch.arange(shape.width - 1, -1, -1, device=columns.device)
        next_positions = slots[:, None] * tables.token_width + behind.clamp(min=0)  # of padding: any
        homes = self._homes(slots, counts)
        self.observe(forward, hidden, slots, homes, next_positions.view(-1))
        return homes

    def propose(self, rows: Tensor, drafting: Tensor, random: Tensor, num_drafts: int) -> None:
        """Nothing is read from the device, so that shapes with one `num_drafts` can be captured. Rows without tokens
        are padding."""
        slots, ends, counts = rows
        ends.copy_(torch.minimum(ends, (self._lengths.index_select(0, slots) + counts - 1).clamp(min=0)))
        self._drafts.index_fill_(0, self._homes(slots, counts), NONE)
        if not num_drafts:
            return
        slots, _, counts = rows.index_select(1, drafting)
        homes = self._homes(slots, counts)
        lengths, room = self._lengths.index_select(0, slots), self.room(slots, counts)
        temperatures = self._params[:, TEMPERATURE].index_select(0, slots)
        best = self._matches.argmax(dim=1).index_select(0, self._range_of(temperatures))  # [rows with drafts]
        before: list[Tensor] = []
        for place, row_logits in enumerate(self.logits(slots, lengths, room, num_drafts, before)):
            logits, positions = row_logits.float(), lengths + place
            if place or not random.numel():
                drafted = self._choose(logits, slots, positions, random, temperatures * self._factors[best])
                by_way = drafted[:, None].expand(-1, len(self._factors))
            else:
                ways = [self._choose(logits, slots, positions, random, temperatures * each) for each in self._factors]
                by_way = torch.stack(ways, dim=1)
                drafted = by_way.gather(1, best[:, None])[:, 0]
            if not place:
                self._first.index_copy_(0, homes, by_way)
            drafted = torch.where(room > place, drafted, NONE)
            self._drafts[:, place].index_copy_(0, homes, drafted)
            before.append(drafted.clamp(min=0))
            self._write_token(slots, positions, before[-1], counts - 1 > place)

    def compare(self, slots: Tensor, token_ids: Tensor) -> Tensor:
        """Count which ways would have proposed `token_ids` [rows] int64, the first sample of each row: 1 for those,
        [rows, ways] int64. For rows without drafts in this step all are 0."""
        has_drafts = self._drafts[:, 0].index_select(0, slots) != NONE
        matches = (self._first.index_select(0, slots) == token_ids[:, None]) & has_drafts[:, None]
        ranges = self._range_of(self._params[:, TEMPERATURE].index_select(0, slots))
        self._matches.mul_(_DECAY).index_add_(0, ranges, matches.double())
        return matches.long()

    def states_of(self, forward: ForwardInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a step's layers left for the drafter, and the positions of its tokens, [tokens] int64."""
        taps, positions = forward.metadata.taps, forward.positions
        return taps.states if taps.layers else hidden, positions if positions.dim() == 1 else positions[0]

    def _homes(self, slots: Tensor, counts: Tensor) -> Tensor:
        """Return the slots that rows of `counts` tokens write."""
        return torch.where(counts > 0, slots, self._padding)

    def _range_of(self, temperatures: Tensor) -> Tensor:
        return torch.bucketize(temperatures, self._ranges, right=True)

    def _last_places(self, slots: Tensor) -> Tensor:
        """Return where in the token table the last tokens of the slots' requests are."""
        return slots * self._tables.token_width + (self._lengths.index_select(0, slots) - 1).clamp(min=0)

    def _choose(self, logits: Tensor, slots: Tensor, positions: Tensor, random: Tensor, temperatures: Tensor) -> Tensor:
        """Return the token that each row of logits proposes for its request's position, [rows] int64: the likeliest.
        If any row is `random`, rows with a temperature draw as their requests' samples are drawn, with the same noise
        and among the tokens that the limits allow."""
        is_host = logits.is_cpu and not INTERPRETED
        if not random.numel() or (is_host and not temperatures.any()):
            return logits.argmax(dim=-1)
        params = self._params.index_select(0, slots)
        params[:, TEMPERATURE] = temperatures
        rows = torch.arange(len(slots), device=slots.device)
        if is_host:
            limited = (params[:, TOP_K] < logits.shape[1]) | (params[:, TOP_P] < 1) | (params[:, MIN_P] > 0)
            return draw_tokens_reference(logits, params, rows, positions, has_limits=bool(limited.any()))
        return draw_tokens(logits, params, rows, positions, has_limits=True)  # rows without limits return at once

    def _write_token(self, slots: Tensor, positions: Tensor, token_ids: Tensor, has_room: Tensor) -> None:
        """Write a token of each row to the token table. A row without room writes its request's last token again."""
        flat = self._tables.flat_token_ids
        places = slots * self._tables.token_width + positions
        places = torch.where(has_room, places, self._last_places(slots))
        flat.index_copy_(0, places, torch.where(has_room, token_ids.int(), flat.index_select(0, places)))


class LayerDrafts(HiddenDrafts):
    """With a `HiddenDrafter`. What a request's last entry reads stays with its slot: the first draft token is computed
    from it. So a step without drafts computes no more of the drafter's layer than the entries."""

    def __init__(
        self, tables: SlotTables, drafter: HiddenDrafter, caches: Sequence[LayerCache], options: HiddenDraftOptions
    ) -> None:
        """`caches` are of the drafter's layers."""
        super().__init__(tables, drafter.taps, options)
        self._drafter, self._caches = drafter, caches
        num_slots, device = tables.num_slots, tables.device
        # [slots + 1, read_size]: what a request's last entry reads
        self._carry = torch.zeros(num_slots + 1, drafter.read_size, dtype=options.dtype, device=device)
        # [slots + 1] int64: 0 until a request's first step has ended; `_carry` is another request's until then.
        self._has_carry = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        super().add(request, slot, edits)
        edits.write(self._has_carry, (slot,), (0,))

    def room(self, slots: Tensor, counts: Tensor) -> Tensor:
        return super().room(slots, counts) * self._has_carry.index_select(0, slots)

    def logits(
        self, slots: Tensor, lengths: Tensor, room: Tensor, num_drafts: int, drafted: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        read, token_ids = self._carry.index_select(0, slots), self._token_ids(self._last_places(slots))
        for place in range(num_drafts):
            read = self._enter(slots, lengths + place - 1, read, drafted[-1] if place else token_ids, room > place)
            yield self._drafter.compute_logits(read)

    def observe(
        self, forward: ForwardInputs, hidden: Tensor, slots: Tensor, homes: Tensor, next_positions: Tensor
    ) -> None:
        """Also keep what the entries of the rows' last true tokens read."""
        metadata, (states, positions) = forward.metadata, self.states_of(forward, hidden)
        read, next_ids = self._drafter.combine(states), self._token_ids(next_positions)
        self._drafter.observe(Entries(read, next_ids, positions), self._caches, metadata)
        num_behind = (metadata.seq_lens - self._lengths.index_select(0, slots) + 1).clamp(min=0)  # rejected drafts
        last = metadata.query_start_loc[1:] - 1 - num_behind
        self._carry.index_copy_(0, homes, read.index_select(0, last))
        self._has_carry.index_fill_(0, homes, 1)

    def _token_ids(self, places: Tensor) -> Tensor:
        """Return the token table's ids there, int64. -1 stands for a prompt's embedding; behind a pooled request's
        last token is any."""
        return self._tables.flat_token_ids.index_select(0, places).clamp(min=0).long()

    def _enter(self, slots: Tensor, ends: Tensor, read: Tensor, token_ids: Tensor, is_needed: Tensor) -> Tensor:
        """Return what the entries of the last of each row's `ends` tokens return, behind which `token_ids` are. Rows
        that are not needed write none."""
        tables = self._tables
        rows = torch.stack((slots, ends * is_needed, is_needed.long()))
        inputs = decode_inputs(
            rows, tables.token_ids, tables.block_tables, tables.block_size, position_deltas=tables.position_deltas
        )
        entries = Entries(read, token_ids, inputs.positions)
        return self._drafter(entries, self._caches, decode_metadata(inputs))
