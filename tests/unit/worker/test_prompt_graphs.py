"""Captured steps with prompts: the size that a step is padded to, padding, and the same hidden states and tokens."""

from collections.abc import Sequence

import numpy as np
import pytest
from torch import Tensor

from proa.contract import SamplingParams
from proa_engine.step.columns import Rows, TokenRows
from proa_engine.step.prompt_graphs import PromptGraphs, PromptShape, max_tokens, pad_prompts, prompt_shapes
from proa_engine.step.slots import SlotTables
from proa_engine.step.step_inputs import PromptRows
from support.runner import BLOCK_SIZE, FakeCapture, RunnerHarness, make_batch

GREEDY = SamplingParams(temperature=0.0)
SMALL, LARGE, MIXED = PromptShape(8, 0, 3), PromptShape(16, 0, 3), PromptShape(16, 4, 3)


def tables() -> SlotTables:
    return make_batch(max_num_seqs=5).tables


def rows(*lengths: tuple[int, int]) -> Rows:
    """Rows of slots 0, 1, …: (computed tokens, tokens to compute) each."""
    starts, counts = np.array(lengths).T
    first = np.cumsum([0, *counts])
    names, slots = [str(i) for i in range(counts.size)], np.arange(counts.size)
    return Rows(names, slots, starts, starts + counts, counts, np.ones_like(slots), first, {})


def captured(shapes: Sequence[PromptShape]) -> PromptGraphs:
    graphs = PromptGraphs(shapes, tables())
    graphs.capture(lambda rows, arrays: arrays[rows.positions], FakeCapture())
    return graphs


def test_steps_are_captured_with_decodes_and_without_up_to_the_token_limit() -> None:
    shapes = prompt_shapes(20, 200)
    assert shapes == [
        PromptShape(*sizes, 21) for sizes in ((64, 0), (64, 20), (128, 0), (128, 20), (192, 0), (192, 20))
    ]
    assert {shape.num_decodes for shape in prompt_shapes(100, 64)} == {0, 64}, "a decode has a token"
    assert prompt_shapes(20, 63) == []
    assert max(shape.num_tokens for shape in prompt_shapes(256, 8192)) == 2048


def test_the_largest_step_has_so_many_products_that_a_gpu_computes_as_long_as_it_is_launched() -> None:
    layers_of_8b = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    sizes = [max_tokens(layers_of_8b, multiplies_8_bits=has) for has in (False, True)]
    assert [max(shape.num_tokens for shape in prompt_shapes(256, size)) for size in sizes] == [1024, 2048]


def test_a_step_takes_the_smallest_shape_that_its_tokens_and_rows_fit_into() -> None:
    graphs = captured([SMALL, LARGE, MIXED])

    def shape_of(*lengths: tuple[int, int]) -> PromptShape | None:
        laid_out = graphs.lay_out(rows(*lengths))
        return None if laid_out is None else laid_out[0]

    assert shape_of((0, 8)) == SMALL
    assert shape_of((0, 4), (7, 5)) == LARGE
    assert shape_of((3, 1), (0, 2)) == MIXED, "none is captured with decodes and 8 tokens"
    assert shape_of((0, 17)) is None, "too many tokens"
    assert shape_of((0, 2), (0, 2), (0, 2)) is None, "too many prompts: one row is for padding"
    assert shape_of(*[(3, 1)] * 5, (0, 2)) is None, "too many decodes"
    assert shape_of((3, 1)) is None, "no prompts"
    graphs.clear()
    assert shape_of((0, 8)) is None


def test_the_largest_shape_is_captured_first() -> None:
    order: list[int] = []

    def forward(rows: TokenRows, arrays: Sequence[Tensor]) -> Tensor:
        assert arrays[rows.seq_lens].numel() == rows.num_decodes + 3
        order.append(arrays[rows.positions].numel())
        return arrays[rows.positions]

    PromptGraphs([SMALL, LARGE, MIXED], tables()).capture(forward, FakeCapture())
    assert order == [16, 16, 8]


def test_padding_attends_to_nothing_and_is_written_to_no_block() -> None:
    table = tables()
    values = pad_prompts(rows((9, 1), (5, 1), (6, 5)), 2, MIXED, table)
    step = MIXED.token_rows(256)
    arrays = [each.tolist() for each in np.split(values, np.cumsum(MIXED.lengths)[:-1])]
    positions = [9, 5, *range(6, 11)]
    assert arrays[step.positions] == [*positions, *[0] * 9]
    slots = [0, 1, *[2] * 5, *[table.padding_slot] * 9]
    expected = [slot * table.token_width + position for slot, position in zip(slots, arrays[0], strict=True)]
    assert arrays[step.token_positions] == expected
    expected = [
        slot * table.max_blocks + position // BLOCK_SIZE for slot, position in zip(slots, arrays[0], strict=True)
    ]
    assert arrays[step.block_positions] == expected
    assert arrays[step.block_offsets] == [*(position % BLOCK_SIZE for position in positions), *[-1] * 9]
    # Two decodes and two empty rows; a prompt, the tokens of padding, an empty row.
    assert arrays[step.query_start_loc] == [0, 1, 2, 2, 2, 7, 16, 16]
    assert arrays[step.seq_lens] == [10, 6, 0, 0, 11, 0, 0]
    assert arrays[step.slots] == [0, 1, *[table.padding_slot] * 2, 2, *[table.padding_slot] * 2]


def test_a_step_that_fills_its_shape_has_no_tokens_of_padding() -> None:
    values = pad_prompts(rows((0, 3), (2, 5)), 0, SMALL, tables())
    arrays = np.split(values, np.cumsum(SMALL.lengths)[:-1])
    assert arrays[SMALL.token_rows(256).query_start_loc].tolist() == [0, 3, 8, 8]


@pytest.mark.parametrize("num_decodes", [0, 3])
def test_replayed_steps_sample_the_same_tokens(num_decodes: int) -> None:
    outputs = []
    for shapes in ((), (LARGE, MIXED)):
        harness = RunnerHarness(max_num_seqs=6, graphs=True, prompt_shapes=shapes)
        old = {f"old{i}": (list(range(i, i + 4)), i + 4, GREEDY) for i in range(num_decodes)}
        steps = [harness.step({name: row}) for name, row in old.items()]
        plan = harness.schedule(
            {"a": ([1, 2, 3], 3, GREEDY), "b": ([4, 5, 6, 7], 4, GREEDY)}, known=dict.fromkeys(old, 4)
        )
        inputs = harness.runner.prepare_inputs(plan)
        assert inputs is not None
        assert isinstance(inputs.rows, PromptRows) == bool(shapes)
        steps.append(harness.run(inputs))
        token_ids = harness.model.calls[-1][0][: inputs.num_tokens]
        outputs.append((steps, token_ids.tolist()))
    assert outputs[0] == outputs[1]
