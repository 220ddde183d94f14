"""Captured decodes: the size that a batch is padded to, padding rows, and the same tokens as without graphs."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from proa.contract import SamplingParams
from proa.imports import no_garbage_collection
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.kernels.sampling.decode_inputs import decode_inputs
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory.cache_plan import CacheMemory
from proa_engine.models import read_config
from proa_engine.models.loader import load_model
from proa_engine.step.decode_graphs import DecodeGraphs, GraphShape, graph_shapes, pad_rows
from proa_engine.step.model_runner import ModelRunner
from proa_engine.worker.warmup_steps import decode_step, prefill_step
from support.paged_model import nan_caches
from support.runner import BLOCK_SIZE, FakeCapture, RunnerHarness, make_batch
from support.tiny_models import VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
PARAMS = [SamplingParams(temperature=0.0), SamplingParams(key=5, top_k=20, repetition_penalty=1.3, logprobs=2)]


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (32, [1, 2, 4, 8, 16, 24, 32])],
)
def test_capture_sizes_reach_from_one_row_to_the_largest_batch(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_shapes(max_num_seqs) == [GraphShape(size, 1) for size in sizes]


def test_with_drafts_both_widths_are_captured_up_to_the_token_budget() -> None:
    assert graph_shapes(9, 4, max_num_batched_tokens=40) == [
        *(GraphShape(1, 1), GraphShape(2, 1), GraphShape(4, 1), GraphShape(1, 5), GraphShape(8, 1), GraphShape(9, 1)),
        *(GraphShape(2, 5), GraphShape(4, 5), GraphShape(8, 5)),
    ]
    assert max(shape.num_tokens for shape in graph_shapes(1024, 4, 1 << 20)) == 2040


def test_a_batch_takes_the_next_size_once_graphs_are_captured() -> None:
    graphs = DecodeGraphs(graph_shapes(8), CPU)
    assert graphs.shape_for(1, 1) is None
    order: list[int] = []
    graphs.capture(lambda rows, _: order.append(rows.shape[1]) or rows[1], FakeCapture())  # type: ignore[func-returns-value]
    assert order == [8, 4, 2, 1], "the largest size first"
    shapes = [graphs.shape_for(count, 1) for count in (1, 2, 3, 5, 8, 9)]
    assert shapes == [*(GraphShape(size, 1) for size in (1, 2, 4, 8, 8)), None]


def test_rows_with_drafts_take_the_width_that_all_of_them_fit_into() -> None:
    graphs = DecodeGraphs(graph_shapes(4, 3, max_num_batched_tokens=8), CPU)
    graphs.capture(lambda rows, shape: rows[1].repeat(shape.width), FakeCapture())
    assert graphs.shape_for(2, 1) == GraphShape(2, 1)
    assert graphs.shape_for(1, 2) == graphs.shape_for(1, 4) == GraphShape(1, 4)
    assert graphs.shape_for(3, 4) is None, "more tokens than the budget"
    assert graphs.shape_for(1, 5) is None


@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_replayed_steps_sample_the_same_tokens(count: int) -> None:
    outputs = []
    for graphs in (False, True):
        harness = RunnerHarness(max_num_seqs=12, graphs=graphs)
        prompts = {f"r{i}": (list(range(i, 2 * i + 3)), i + 3, PARAMS[i % 2]) for i in range(count)}
        steps = [harness.step(prompts)]
        for step in range(BLOCK_SIZE + 2):  # into a new block
            known = {name: len(tokens) + step for name, (tokens, _, _) in prompts.items()}
            steps.append(harness.step(known=known, finished=["r0"] if step == 3 and count > 1 else []))
            if step == 2 and count > 1:
                prompts.pop("r0")
        outputs.append(steps)
        if graphs:
            assert harness.model.calls[-1][0].shape[0] in [shape.num_rows for shape in graph_shapes(12)]
    assert outputs[0] == outputs[1]


PLAIN = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, key=3),
    SamplingParams(temperature=0.9, key=4, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.2, key=5, min_p=0.02),
]


@pytest.mark.parametrize("count", [1, 4, 6])
def test_plain_steps_are_sampled_by_their_graph_and_give_the_same_tokens(count: int) -> None:
    outputs = []
    for graphs in (False, True):
        harness = RunnerHarness(max_num_seqs=8, graphs=graphs)
        prompts = {f"r{i}": (list(range(i, 2 * i + 3)), i + 3, PLAIN[i % 4]) for i in range(count)}
        steps = [harness.step(prompts)]
        steps += [harness.step(known={name: row[1] + step for name, row in prompts.items()}) for step in range(9)]
        outputs.append(steps)
        assert harness.capture.num_draws == harness.capture.num_replays == 9 * graphs
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, logit_bias={7: 3.0}),
        SamplingParams(temperature=0.0, bad_words_token_ids=((1,),)),
    ],
)
def test_a_row_that_is_not_plain_is_sampled_by_the_sampler_and_so_are_the_rows_beside_it(
    params: SamplingParams,
) -> None:
    outputs = []
    for graphs in (False, True):
        harness = RunnerHarness(max_num_seqs=8, graphs=graphs)
        steps = [harness.step({"a": ([1, 2, 3], 3, PLAIN[0]), "b": ([4, 5], 2, params)})]
        steps += [harness.step(known={"a": 3 + step, "b": 2 + step}) for step in range(3)]
        assert (harness.capture.num_replays, harness.capture.num_draws) == (3 * graphs, 0)
        steps.append(harness.step(known={"a": 6}, finished=["b"]))
        assert harness.capture.num_draws == graphs
        outputs.append(steps)
    assert outputs[0] == outputs[1]


def test_a_row_that_computes_a_known_token_keeps_the_token_behind_it() -> None:
    """A chunk of one token of a prompt is replayed like a decode, but samples nothing."""
    harness = RunnerHarness(max_num_seqs=8, graphs=True)
    harness.step({"a": ([1, 2, 3], 3, PLAIN[0])})
    prompt = [4, 5, 6, 7]
    harness.step({"b": (prompt, 4, PLAIN[0])}, known={"a": 3}, scheduled={"b": 1})
    assert (harness.capture.num_replays, harness.capture.num_draws) == (1, 0)
    assert harness.batch.tables.token_ids[harness.batch.slots_of(["b"])[0], :4].tolist() == prompt


def test_the_results_of_a_draw_are_kept_when_the_next_step_draws() -> None:
    harness = RunnerHarness(max_num_seqs=4, graphs=True)
    harness.step({"a": ([1, 2, 3], 3, PLAIN[1])})
    tensors = []
    for computed in (3, 4):
        inputs = harness.runner.prepare_inputs(harness.schedule(known={"a": computed}))
        assert inputs is not None
        harness.runner.execute_model(inputs)
        tensors.append(harness.runner.sample_tokens().token_ids)
    drawn = torch.cat([token_ids for token_ids in tensors if token_ids is not None])
    assert drawn.tolist() == harness.batch.tables.token_ids[harness.batch.slots_of(["a"])[0], 4:6].tolist()


def test_a_step_with_a_prefill_or_prompt_logprobs_is_not_replayed() -> None:
    harness = RunnerHarness(max_num_seqs=4, graphs=True)
    harness.step({"a": ([1, 2, 3], 3, PARAMS[0])})
    harness.step({"b": ([1, 2, 3], 3, PARAMS[0])}, known={"a": 3})
    assert harness.model.calls[-1][0].tolist()[1:] == [1, 2, 3]
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    output = harness.step({"c": ([7, 8], 2, params)}, known={"a": 4, "b": 3}, scheduled={"c": 1})
    assert len(output.prompt_logprobs["c"]) == 1


def test_padding_rows_read_nothing_and_write_nothing() -> None:
    token_ids = torch.arange(40, dtype=torch.int32).view(4, 10)
    tables = torch.tensor([[[3, 5, 9], [1, 2, 9], [9, 9, 9], [9, 9, 9]]], dtype=torch.int32)
    inputs = decode_inputs(torch.tensor([[1, 0, 0], [5, 1, 0], [1, 1, 0]]), token_ids, tables, BLOCK_SIZE)
    assert inputs.input_ids.tolist() == [14, 0, 0]
    assert inputs.positions.tolist() == [4, 0, 0]
    assert inputs.seq_lens.tolist() == [5, 1, 0]
    assert inputs.slot_mappings.tolist() == [[2 * BLOCK_SIZE, 3 * BLOCK_SIZE, -1]]


def test_padding_before_a_rows_own_tokens_reads_nothing_and_writes_nothing() -> None:
    token_ids = torch.arange(40, dtype=torch.int32).view(4, 10)
    tables = torch.tensor([[[3, 5, 9], [1, 2, 9], [9, 9, 9], [9, 9, 9]]], dtype=torch.int32)
    inputs = decode_inputs(torch.tensor([[1, 0, 0], [5, 1, 0], [2, 1, 0]]), token_ids, tables, BLOCK_SIZE, 3)
    assert inputs.input_ids.tolist() == [0, 13, 14, 0, 0, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [0, 3, 4, 0, 0, 0, 0, 0, 0]
    assert inputs.seq_lens.tolist() == [5, 1, 0]
    own = [-1, BLOCK_SIZE + 3, 2 * BLOCK_SIZE, -1, -1, 3 * BLOCK_SIZE, -1, -1, -1]
    assert inputs.slot_mappings.tolist() == [own]


def test_replayed_steps_of_a_model_write_the_same_cache(tmp_path: Path) -> None:
    """The caches start as NaN, so that anything read by padding rows shows."""
    folder = make_tiny_model(tmp_path, "qwen3")
    config = read_config.from_folder(folder)
    model = load_model(
        folder, config, dtype=torch.float32, device=CPU, parallel=ParallelContext(), report=lambda line: None
    )
    results = []
    for graphs in (None, DecodeGraphs([GraphShape(4, 1)], CPU)):
        caches = nan_caches(model, num_blocks=8, block_size=16)
        batch = make_batch(max_num_seqs=4, max_model_len=64, block_size=16, vocab_size=VOCAB_SIZE)
        runner = ModelRunner(model, CacheMemory(caches), batch, max_logprobs=0, graphs=graphs)
        if graphs is not None:
            runner.capture_graphs(FakeCapture())
            assert all(tensor.isnan().all() for cache in caches for tensor in cache.tensors)
        tokens = []
        for step in [prefill_step([20], CacheGroups(num_blocks=8, block_size=16))] + [
            decode_step(["warm-up-0"], 20 + count) for count in range(5)
        ]:
            inputs = runner.prepare_inputs(step)
            assert inputs is not None
            runner.execute_model(inputs)
            tokens.append(runner.sample_tokens().token_ids)
        results.append(
            (
                torch.cat([ids for ids in tokens if ids is not None]),
                torch.stack([tensor for cache in caches for tensor in cache.tensors]),
            )
        )
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)


def test_cleared_graphs_are_not_replayed_and_their_memory_is_freed() -> None:
    four = GraphShape(4, 1)
    graphs = DecodeGraphs([GraphShape(2, 1), four], CPU)
    graphs.capture(lambda rows, _: rows[0], FakeCapture())
    result = weakref.ref(graphs._graphs[four][0].result)
    assert graphs.shape_for(3, 1) == four
    graphs.clear()
    assert graphs.shape_for(3, 1) is None
    assert result() is None


def test_rows_are_padded_to_the_capture_size() -> None:
    rows = pad_rows(np.array([7, 3]), np.array([20, 1]), np.array([3, 1]), 4)
    assert rows.tolist() == [7, 3, 0, 0, 20, 1, 0, 0, 3, 1, 0, 0]


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_off_within_a_capture_and_then_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with no_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
