"""Which adapter each token of a step has, with and without graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from proa.contract import SamplingParams
from proa_engine.core.types import BASE_MODEL, EMPTY_LORA, LoraSlot
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.kernels.products.lora import TokenSlots
from proa_engine.layers.lora import LoraProducts
from proa_engine.step.loras import LoraAdapters
from support.runner import FakeModel, RunnerHarness

GREEDY = SamplingParams(temperature=0)


class SlotModel(FakeModel):
    """Records the slot of each token, -1 for none; None for a step that applies no adapters."""

    def __init__(self, tokens: TokenSlots) -> None:
        super().__init__()
        self.tokens = tokens
        self.slots: list[list[int] | None] = []

    def __call__(self, input_ids: Tensor, positions: Tensor, caches: Any, metadata: Any) -> Tensor:
        slots = torch.full(input_ids.shape, -1)
        for slot, rows in self.tokens.by_slot:
            slots[slice(None) if rows is None else rows] = slot
        self.slots.append(None if self.tokens.are_empty else slots.tolist())
        return super().__call__(input_ids, positions, caches, metadata)


def run_steps(*, graphs: bool, drafts: SpeculativeConfig | None = None) -> list[list[int] | None]:
    """The slots of a prefill of three requests, the second and third with adapters, of their decode, and of the
    decode of the first alone."""
    products = LoraProducts(4, 16, torch.float32, torch.device("cpu"))
    model = SlotModel(products.tokens)
    harness = RunnerHarness(model, max_num_seqs=4, graphs=graphs, drafts=drafts, loras=LoraAdapters(products))
    model.slots.clear()
    plan = harness.schedule({name: ([5, 6, 7], 3, GREEDY) for name in "abc"})
    loras = [BASE_MODEL, LoraSlot(EMPTY_LORA, 3), LoraSlot(EMPTY_LORA, 1)]
    for new, lora in zip(plan.new_requests, loras, strict=True):
        object.__setattr__(new, "lora", lora)
    harness.run(harness.runner.prepare_inputs(plan))
    width = 1 if drafts is None else 1 + drafts.max_drafts
    for known in ({"a": 3, "b": 3, "c": 3}, {"a": 3 + width}):
        gone = {"a", "b", "c"} - known.keys()
        step = harness.schedule(known=known, scheduled=dict.fromkeys(known, width), finished=sorted(gone))
        harness.run(harness.runner.prepare_inputs(step))
    assert harness.capture.num_replays == (2 if graphs else 0)
    return model.slots


PREFILL = [-1] * 3 + [3] * 3 + [1] * 3


@pytest.mark.parametrize("graphs", [False, True])
def test_each_token_has_the_slot_of_its_request(graphs: bool) -> None:
    decode = [-1, 3, 1, -1] if graphs else [-1, 3, 1]  # a graph of four rows
    assert run_steps(graphs=graphs) == [PREFILL, decode, None]


def test_drafts_have_the_slot_of_their_row() -> None:
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    slots = run_steps(graphs=True, drafts=drafts)
    assert slots == [PREFILL, [-1] * 3 + [3] * 3 + [1] * 3 + [-1] * 3, None]


def test_a_slot_is_filled_when_another_adapter_takes_it() -> None:
    adapters = LoraAdapters(LoraProducts(4, 16, torch.float32, torch.device("cpu")))
    adapters._loaded[7] = []
    fills = [
        len(adapters.assign(LoraSlot(lora_id, slot))) for lora_id, slot in ((7, 0), (7, 0), (0, 0), (7, 1), (7, 0))
    ]
    assert fills == [1, 0, 1, 1, 1]
