"""Runners of pipeline stages in one process: the tokens of one runner, with steps in flight, graphs and chunks."""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from proa.contract import SamplingParams
from proa_engine.core.types import SchedulerOutput
from proa_engine.layers.cache_layers import CacheLayer
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory.cache_plan import CacheMemory
from proa_engine.models import read_config
from proa_engine.models.config import at_stage
from proa_engine.models.loader import load_model
from proa_engine.step.async_output import collect
from proa_engine.step.decode_graphs import DecodeGraphs, graph_shapes
from proa_engine.step.model_runner import ModelRunner
from proa_engine.step.pipeline import make_stage_io
from proa_engine.step.step_inputs import StepInputs
from support.paged_model import nan_caches
from support.runner import BLOCK_SIZE, FakeCapture, RunnerHarness, StepResult, make_batch
from support.tiny_models import VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
MAX_NUM_SEQS = 6
GREEDY = SamplingParams(temperature=0.0)
PENALIZED = SamplingParams(key=5, top_k=20, repetition_penalty=1.3, logprobs=2)
SCORED = SamplingParams(temperature=0.8, key=3, prompt_logprobs=1)


class QueueLinks:
    """Links of a ring in one process. Like a send that has not ended, they hold the tensor that was sent."""

    def __init__(self, before: deque[Tensor], behind: deque[Tensor]) -> None:
        self.before = before
        self.behind = behind

    def send(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self.behind.append(x)

    def receive(self, x: Tensor) -> None:
        x.copy_(self.before.popleft())

    def gather_layers(self, own: Sequence[CacheLayer]) -> tuple[Sequence[CacheLayer], int]:
        raise AssertionError("the caches are planned by the test")


class Stages:
    """The runners of all stages. A step is begun on the first one, and ended on the others."""

    def __init__(self, folder: Path, num_stages: int, *, graphs: bool = False) -> None:
        self.queues: list[deque[Tensor]] = [deque() for _ in range(num_stages)]
        self.runners = []
        self.begun: deque[tuple[SchedulerOutput, StepInputs]] = deque()
        self.capture = FakeCapture()
        for index in range(num_stages):
            config = at_stage(read_config.from_folder(folder), index, num_stages)
            model = load_model(
                folder, config, dtype=torch.float32, device=CPU, parallel=ParallelContext(), report=lambda line: None
            )
            links = QueueLinks(self.queues[index - 1], self.queues[index])
            shapes = graph_shapes(MAX_NUM_SEQS)
            runner = ModelRunner(
                model,
                CacheMemory(nan_caches(model, 200, BLOCK_SIZE)),
                make_batch(max_num_seqs=MAX_NUM_SEQS, vocab_size=VOCAB_SIZE, compute_logits=model.compute_logits),
                max_logprobs=5,
                stage=make_stage_io(
                    model, config.stage, links, max_graph_tokens=MAX_NUM_SEQS, example=torch.empty(0, 64)
                )
                if num_stages > 1
                else None,
                graphs=DecodeGraphs(shapes, CPU) if graphs else None,
            )
            if graphs:
                runner.capture_graphs(self.capture)
            self.runners.append(runner)

    def begin(self, plan: SchedulerOutput) -> None:
        inputs = self.runners[0].prepare_inputs(plan)
        assert inputs is not None
        self.runners[0].execute_model(inputs)
        self.begun.append((plan, inputs))

    def end(self) -> StepResult:
        """End the oldest step."""
        plan, first_inputs = self.begun.popleft()
        for runner in self.runners[1:]:
            inputs = runner.prepare_inputs(plan)
            assert inputs is not None
            runner.execute_model(inputs)
            assert runner.sample_tokens().token_ids is None
        return StepResult.of(first_inputs.request_ids, collect(self.runners[0].sample_tokens(), first_inputs))


def plans() -> Iterator[SchedulerOutput]:
    """Steps of two groups of requests in turn. The last prompt of the second group has two chunks."""
    planner = RunnerHarness()
    groups = [
        {"a": ([1, 2, 3], 3, GREEDY), "b": (list(range(9)), 9, PENALIZED), "c": ([7] * 5, 5, GREEDY)},
        {"d": ([4, 5], 2, GREEDY), "e": (list(range(20, 26)), 6, SCORED), "f": (list(range(40, 52)), 12, SCORED)},
    ]
    yield planner.schedule(groups[0])
    yield planner.schedule(groups[1], scheduled={"f": 7})
    known = [{name: len(tokens) for name, (tokens, _, _) in group.items()} for group in groups]
    known[1]["f"] = 7
    for step in range(16):
        group = known[step % 2]
        counts = {"f": 5} if step == 1 else {}
        yield planner.schedule(known=group, scheduled=counts)
        for name in group:
            group[name] += counts.get(name, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("stages"), "qwen3", seed=4, num_hidden_layers=4)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[StepResult]:
    whole, results = Stages(folder, 1), []
    for plan in plans():
        whole.begin(plan)
        results.append(whole.end())
    return results


def prompt_logprobs(results: list[StepResult]) -> list[float]:
    return [entry.logprob for each in results for row in each.prompt_logprobs.values() for entry in row]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_stages_with_steps_in_flight_give_the_results_of_one_runner(
    folder: Path, expected: list[StepResult], num_stages: int, in_flight: int, graphs: bool
) -> None:
    stages, results = Stages(folder, num_stages, graphs=graphs), []
    for plan in plans():
        stages.begin(plan)
        if len(stages.begun) == in_flight:
            results.append(stages.end())
    while stages.begun:
        results.append(stages.end())
    assert [each.sampled_token_ids for each in results] == [each.sampled_token_ids for each in expected]
    assert [each.request_ids for each in results] == [each.request_ids for each in expected]
    assert prompt_logprobs(results) == pytest.approx(prompt_logprobs(expected), abs=1e-4)
    assert not any(stages.queues)
    assert stages.capture.num_draws == 0
    assert (stages.capture.num_replays > 10) is graphs


def test_only_the_rows_that_are_needed_return_to_the_first_stage(folder: Path) -> None:
    stages, planner = Stages(folder, 2), RunnerHarness()
    returned: list[int] = []
    returns = stages.queues[1]

    class Counting(deque[Tensor]):
        def append(self, x: Tensor) -> None:
            returned.append(len(x))
            super().append(x)

    stages.queues[1] = counting = Counting(returns)
    for index, runner in enumerate(stages.runners):
        links = runner._stage._links  # type: ignore[attr-defined]
        links.before, links.behind = (counting, links.behind) if index == 0 else (links.before, counting)
    for plan in (
        planner.schedule({"a": (list(range(9)), 9, GREEDY), "b": (list(range(5)), 5, GREEDY)}, scheduled={"b": 4}),
        planner.schedule({"c": (list(range(30, 39)), 9, GREEDY)}, scheduled={"c": 3}),
        planner.schedule({"d": (list(range(50, 57)), 7, SCORED)}),
    ):
        stages.begin(plan)
        stages.end()
    assert returned == [1, 7], "the sampled row of a; nothing; all rows whose log probabilities are asked for"
