"""Ways to draw: each proposes what the model would sample from the drafter's logits in that way, and the way that was
right most often at a range of temperatures is used there."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from proa_engine.core.speculation import RANGES, WAYS, range_of
from proa_engine.kernels.sampling import sampling_params as columns
from proa_engine.kernels.sampling.sampling_reference import sample
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.models.drafters.base import Entries
from proa_engine.step.hidden_drafts import HiddenDraftOptions, LayerDrafts
from proa_engine.step.slots import SlotTables

VOCAB_SIZE, NUM_SLOTS, LENGTH = 50, 4, 6
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)


class EqualDrafter:
    """States are logits, and an entry returns the state that it reads."""

    taps: tuple[int, ...] = ()
    read_size = VOCAB_SIZE

    def combine(self, states: Tensor) -> Tensor:
        return states

    def observe(self, entries: Entries, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> None: ...

    def __call__(self, entries: Entries, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        return entries.read

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return ()

    def parameters(self) -> Iterator[Tensor]:
        return iter(())


LOGITS = 2 * torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
SLOTS = torch.arange(NUM_SLOTS)
RANDOM = torch.tensor([slot for slot, temperature in enumerate(TEMPERATURES) if temperature])
ROWS = torch.stack((SLOTS, torch.full((NUM_SLOTS,), LENGTH + 9), torch.full((NUM_SLOTS,), 3)))


def make_drafts(method: str, top_k: int = VOCAB_SIZE) -> LayerDrafts:
    """With a request of `LENGTH` tokens in each slot, at its temperature."""
    tables = SlotTables(
        max_num_seqs=NUM_SLOTS, max_model_len=32, block_size=4, vocab_size=VOCAB_SIZE, device=torch.device("cpu")
    )
    params = torch.zeros(NUM_SLOTS, columns.NUM_COLUMNS, dtype=torch.float64)
    params[:, columns.TEMPERATURE] = torch.tensor(TEMPERATURES, dtype=torch.float64)
    params[:, columns.KEY_LO] = SLOTS + 7
    params[:, columns.TOP_P], params[:, columns.TOP_K] = 1, top_k
    options = HiddenDraftOptions(2, WAYS[method], params, VOCAB_SIZE, torch.float32)
    drafts = LayerDrafts(tables, EqualDrafter(), (), options)
    drafts._carry[:NUM_SLOTS] = LOGITS
    drafts._state.can_draft.fill_(1)
    drafts._lengths.fill_(LENGTH)
    return drafts


def expected(factor: float, position: int, top_k: int = VOCAB_SIZE) -> list[int]:
    """What each request would sample at a part of its temperature."""
    tokens = LOGITS.argmax(dim=1).tolist()
    least = LOGITS.topk(top_k, dim=1).values[:, -1:]
    allowed = LOGITS.masked_fill(least > LOGITS, -torch.inf)
    for slot, temperature in enumerate(TEMPERATURES):
        if temperature and factor:
            scaled = allowed[slot : slot + 1] / (temperature * factor)
            keys = torch.tensor([slot + 7], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
            tokens[slot] = int(sample(scaled, *keys, torch.tensor([position], dtype=torch.int32)))
    return tokens


@pytest.mark.parametrize(
    ("method", "factor", "top_k"), [("greedy", 0.0, 50), ("probabilistic", 1.0, 50), ("probabilistic", 1.0, 2)]
)
def test_a_fixed_way_proposes_what_the_model_would_sample(method: str, factor: float, top_k: int) -> None:
    drafts = make_drafts(method, top_k)
    drafts.propose(ROWS.clone(), SLOTS, RANDOM, 2)
    for place in range(2):
        assert drafts._drafts[:NUM_SLOTS, place].tolist() == expected(factor, LENGTH + place, top_k)
    assert drafts._tables.token_ids[:NUM_SLOTS, LENGTH : LENGTH + 2].tolist() == drafts._drafts[:NUM_SLOTS].tolist()


def test_the_way_that_was_right_most_often_at_a_range_of_temperatures_is_used_there() -> None:
    drafts = make_drafts("auto")
    drafts.propose(ROWS.clone(), SLOTS, RANDOM, 2)
    by_way = [expected(way.factor, LENGTH) for way in WAYS["auto"]]
    assert drafts._state.first[:NUM_SLOTS].T.tolist() == by_way
    assert drafts._drafts[:NUM_SLOTS, 0].tolist() == by_way[0]  # without counts
    right = torch.tensor([by_way[0][0], by_way[2][1], by_way[1][2], by_way[2][3]])
    matches = drafts.compare(right, SLOTS, SLOTS)
    assert matches.tolist() == [[int(way[slot] == right[slot]) for way in by_way] for slot in range(NUM_SLOTS)]
    drafts.propose(ROWS.clone(), SLOTS, RANDOM, 2)
    assert drafts._drafts[:NUM_SLOTS, 0].tolist() == right.tolist()


def test_rows_without_drafts_are_not_counted() -> None:
    drafts = make_drafts("auto")
    drafts._state.can_draft[2] = 0
    rows = ROWS.clone()
    rows[2, 1] = 1
    drafts.propose(rows, torch.tensor([0, 2, 3]), torch.tensor([1, 2]), 2)
    assert drafts._drafts[1:3].tolist() == [[-1, -1], [-1, -1]]
    assert drafts.compare(drafts._state.first[:NUM_SLOTS, 0], SLOTS, SLOTS).sum(dim=1).gt(0).tolist() == [
        True,
        False,
        False,
        True,
    ]


def test_a_row_with_fewer_drafts_writes_no_token_behind_its_own() -> None:
    drafts = make_drafts("greedy")
    drafts._tables.token_ids.fill_(49)
    rows = ROWS.clone()
    rows[2] = torch.tensor([2, 3, 1, 2])
    drafts.propose(rows, torch.tensor([0, 1, 3]), torch.tensor([1, 2]), 2)
    written = [(drafts._tables.token_ids[slot] != 49).nonzero()[:, 0].tolist() for slot in range(NUM_SLOTS)]
    assert written == [[LENGTH], [LENGTH, LENGTH + 1], [], [LENGTH]]
    assert rows[1].tolist() == [LENGTH + 1, LENGTH + 2, LENGTH, LENGTH + 1]


@pytest.mark.parametrize(("temperature", "name"), [(0, "0-0.2"), (0.2, "0.2-0.5"), (0.84, "0.5-0.85"), (3, "0.85-")])
def test_ranges_of_temperatures_have_their_lower_end(temperature: float, name: str) -> None:
    assert RANGES[range_of(temperature)] == name
