"""InputBuilder: a step made from the one before equals one that is built anew."""

import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from proa.contract import SamplingParams
from proa_engine.step.columns import TokenRows
from proa_engine.step.decode_graphs import DecodeGraphs, graph_shapes
from proa_engine.step.input_batch import InputBatch
from proa_engine.step.staging import Staging
from proa_engine.step.step_inputs import DecodeRows, StepInputs
from support.runner import FakeCapture, RunnerHarness, input_builder, make_batch

MAX_RUNNING = 7
PLAIN, PENALIZED = SamplingParams(temperature=0), SamplingParams(temperature=0.5, repetition_penalty=1.1, top_k=3)
RULED = SamplingParams(temperature=1.0, min_tokens=9)
SCORED = SamplingParams(temperature=0.7, top_p=0.5, logprobs=2, logprob_token_ids=(3, 5))


def batch_and_graphs() -> tuple[InputBatch, DecodeGraphs]:
    batch = make_batch(max_num_seqs=MAX_RUNNING)
    batch.tables.token_ids.zero_()
    graphs = DecodeGraphs(graph_shapes(MAX_RUNNING), torch.device("cpu"))
    graphs.capture(lambda rows, shape: torch.zeros(rows.shape[1] * shape.width), FakeCapture())
    return batch, graphs


def contents(inputs: StepInputs | None) -> dict[str, Any]:
    """The inputs with arrays in the place of staged indices."""
    if inputs is None:
        return {}
    starts = [sum(inputs.arrays.lengths[:index]) for index in range(len(inputs.arrays.lengths))]
    arrays = [
        inputs.arrays.values[start : start + length].tolist()
        for start, length in zip(starts, inputs.arrays.lengths, strict=True)
    ]
    fields = asdict(inputs)
    sampling = inputs.sampling
    if sampling is not None:
        fields["sampling"]["rows"] = sampling.rows.tolist()
        for name in ("slots", "positions", "write_to"):
            fields["sampling"][name] = arrays[getattr(sampling, name)]
        assert sampling.hidden_rows is None or isinstance(inputs.rows, TokenRows)
        del fields["sampling"]["hidden_rows"]
        for name, rows in [(f"needs {index}", each) for index, each in enumerate(sampling.needs)] + [
            ("random", sampling.random)
        ]:
            fields[name] = rows.count, None if rows.index is None else arrays[rows.index]
        del fields["sampling"]["needs"], fields["sampling"]["random"]
        if sampling.logprobs is not None:
            rows, named = sampling.logprobs.rows, sampling.logprobs.named_tokens
            fields["sampling"]["logprobs"]["rows"] = rows.count, None if rows.index is None else arrays[rows.index]
            fields["sampling"]["logprobs"]["named_tokens"] = named and (arrays[named.index], named.width)
    if isinstance(inputs.rows, DecodeRows):
        fields["rows"] = inputs.rows.shape, arrays[inputs.rows.rows]
    del fields["arrays"], fields["edits"]
    return fields


def tables(batch: InputBatch, inputs: StepInputs | None) -> list[Any]:
    """What is on the device after the step's edits."""
    if inputs is not None:
        inputs.edits.apply(Staging(torch.device("cpu")).ship(inputs.arrays))
    params = batch.sampling.params
    return [table.tolist() for table in (batch.tables.token_ids, batch.tables.block_tables, params)]


@pytest.mark.parametrize("kinds", [(PLAIN,), (PLAIN, PENALIZED, SCORED), (PLAIN, RULED)])
def test_a_continued_step_equals_one_that_is_built_anew(kinds: tuple[SamplingParams, ...]) -> None:
    rng = random.Random(3)
    batch, graphs = batch_and_graphs()
    expected, expected_graphs = batch_and_graphs()
    builder, schedule = input_builder(batch, graphs), RunnerHarness().schedule
    computed: dict[str, int] = {}
    num_continued = 0
    for step in range(200):
        gone = [name for name in computed if rng.random() < 0.02 or computed[name] > 200]
        for name in gone:
            del computed[name]
        new = {}
        if len(computed) < MAX_RUNNING and rng.random() < 0.1:
            new[f"r{step}"] = list(range(rng.choice([1, 9]))), 1, rng.choice(kinds)
        known = {name: count for name, count in computed.items() if len(computed) < 3 or rng.random() < 0.995}
        plan = schedule(new, known, finished=gone)
        plan.cached_requests = [
            replace(each, new_token_ids=[9]) if rng.random() < 0.1 else each for each in plan.cached_requests
        ]
        plan.grammar_rows = [0] if rng.random() < 0.5 else []
        last = builder._last
        inputs, anew = builder.build(plan), input_builder(expected, expected_graphs).build(plan)
        num_continued += inputs is not None and builder._last is last is not None
        assert contents(inputs) == contents(anew)
        assert tables(batch, inputs) == tables(expected, anew)
        assert batch.tables.num_tokens.tolist() == expected.tables.num_tokens.tolist()
        assert batch.tables.num_computed_tokens.tolist() == expected.tables.num_computed_tokens.tolist()
        computed |= {name: len(tokens) for name, (tokens, _, _) in new.items()}
        computed |= {name: count + 1 for name, count in known.items()}
    assert (num_continued > 100) is (RULED not in kinds)


def test_steps_in_flight_keep_their_arrays() -> None:
    batch, graphs = batch_and_graphs()
    builder, schedule = input_builder(batch, graphs), RunnerHarness().schedule
    builder.build(schedule({"a": ([1, 2, 3], 3, PLAIN)}))
    steps = [builder.build(schedule(known={"a": count})) for count in (3, 4, 5)]
    assert [contents(inputs)["rows"][1] for inputs in steps] == [[0, 4, 1], [0, 5, 1], [0, 6, 1]]
