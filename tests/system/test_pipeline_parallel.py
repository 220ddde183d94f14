"""Pipeline stages give the tokens of one process, with every kind of cache. A lost stage fails the engine."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.core.executor import ExecutorFailed
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.operations import Operation, Sleep, WakeUp
from proa_engine.step.async_output import StepTensors
from proa_engine.step.step_inputs import StepInputs
from support.cache_families import assert_equal
from support.engine import Engine, Result, build_core, request, run
from support.processes import worker_pids
from support.tiny_models import BYTES, LATENT, make_tiny_model

DEADLINE = 60.0
CONFIG: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 48, "max_num_seqs": 8}
SMALL_CACHE: dict[str, Any] = {"num_gpu_blocks_override": 38}  # one of the longest requests, with two tables of windows
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 5},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 24,
    },
    "qwen3_next": {},  # the first stage has a state and no keys or values
    "nemotron_h": {  # the second stage has feed-forward layers alone, and no cache
        "layers_block_type": ["linear_attention", "full_attention", "moe", "moe"]
    },
    "gpt_oss": {"num_hidden_layers": 4},
    "deepseek_v3": LATENT,
}
ROWS = random.Random(5)
PROMPTS = [ROWS.choices(range(BYTES), k=ROWS.randint(24, 56)) for _ in range(10)]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, key=5, top_p=0.9, repetition_penalty=1.1)
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("stages"), "qwen3", seed=3, num_hidden_layers=5)


@pytest.fixture(scope="module")
def single(folder: Path) -> list[Result]:
    with build_core(folder, enable_prefix_caching=False, **CONFIG) as alone:
        return results(alone, requests())


def requests(name: str = "") -> list[EngineCoreRequest]:
    params = [GREEDY, SAMPLED, GREEDY, SCORED]
    return [request(f"{name}{i}", prompt, params[i % 4]) for i, prompt in enumerate(PROMPTS)]


def results(engine: Engine, wanted: list[EngineCoreRequest]) -> list[Result]:
    return list(run(engine, wanted).values())


def operate(engine: Engine, operation: Operation[None]) -> None:
    done = engine.core.operate(operation)
    while not done.done():
        engine.core.step()


def assert_equal_prompt_logprobs(ours: list[Result], theirs: list[Result]) -> None:
    def logprobs(of: list[Result]) -> list[float]:
        return [entry.logprob for each in of for entry in each.prompt_logprobs]

    assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)
    assert len(logprobs(ours)) > 50


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_give_the_tokens_of_one_process(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family, **({"seed": 3} | FAMILIES[family]))
    with build_core(folder, enable_prefix_caching=False, **CONFIG) as alone:
        expected = results(alone, requests())
        [whole] = alone.executor.started.rank_sizes
    with build_core(folder, pipeline_parallel_size=2, **SMALL_CACHE, **CONFIG) as engine:
        ours = results(engine, requests())
        assert_equal(ours, expected)
        assert_equal_prompt_logprobs(ours, expected)
        assert engine.core.stats().num_preemptions > 0 or engine.executor.started.cache_groups.windows
        again = results(engine, requests("again-")[:2])
        assert_equal(again, expected[:2])
        first, second = engine.executor.started.rank_sizes
    assert first.cache.num_blocks == second.cache.num_blocks == 38
    assert first.weight_bytes < whole.weight_bytes > second.weight_bytes
    assert first.weight_bytes + second.weight_bytes < 1.1 * whole.weight_bytes  # rotary angles are on both


class Order:
    """What a rank has done, in order, of the steps from when this is made."""

    def __init__(self, engine: Engine) -> None:
        self.events: list[str] = []
        runner = engine.executor._worker.model_runner
        execute, sample = runner.execute_model, runner.sample_tokens

        def execute_model(inputs: StepInputs) -> None:
            self.events.append("execute")
            execute(inputs)

        def sample_tokens(masks: GrammarMasks | None = None) -> StepTensors:
            self.events.append("sample")
            return sample(masks)

        runner.execute_model = execute_model  # type: ignore[method-assign]
        runner.sample_tokens = sample_tokens  # type: ignore[method-assign]


def test_the_first_stage_executes_the_next_steps_before_it_samples(folder: Path, single: list[Result]) -> None:
    with build_core(folder, pipeline_parallel_size=3, **CONFIG) as engine:
        order = Order(engine)
        assert_equal(results(engine, requests()), single)
        num_waiting = [0]
        for event in order.events:
            num_waiting.append(num_waiting[-1] + (1 if event == "execute" else -1))
    assert num_waiting[-1] == 0
    assert max(num_waiting) == 3
    assert num_waiting.count(3) > 0.25 * len(num_waiting)


def test_tensor_parallel_ranks_of_each_stage_give_the_tokens_of_one_process(folder: Path, single: list[Result]) -> None:
    with build_core(folder, pipeline_parallel_size=2, tensor_parallel_size=2, **SMALL_CACHE, **CONFIG) as engine:
        assert_equal(results(engine, requests()), single)
        assert engine.core.stats().num_preemptions > 0
        operate(engine, Sleep(2))
        operate(engine, WakeUp())
        assert_equal(results(engine, requests("awake-")[:2]), single[:2])


def test_requests_in_the_slots_of_aborted_ones_have_their_own_tokens(folder: Path, single: list[Result]) -> None:
    wanted = requests()
    names = [each.request_id for each in wanted]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    with build_core(folder, pipeline_parallel_size=2, **CONFIG) as engine:
        rng, number = random.Random(3), 0
        while wanted or engine.core.has_unfinished_requests():
            if number < 150 and number % 5 == 0 and wanted:
                engine.core.submit(wanted.pop(0))
            if number < 150:  # eight slots: one is given away while a step with its request is in flight
                engine.core.submit(request(f"aborted-{number}", PROMPTS[number % 10], SAMPLED))
                engine.core.abort([f"aborted-{rng.randint(max(number - 9, 0), number)}"])
            else:
                engine.core.abort([f"aborted-{number - 150}"])
            number += 1
            outputs = engine.core.step()
            if outputs is not None:
                for output in outputs.outputs:
                    if output.request_id in tokens:
                        tokens[output.request_id] += output.new_token_ids
                for name, token_id in zip(outputs.plain.request_ids, outputs.plain.token_ids, strict=True):
                    if name in tokens:
                        tokens[name].append(token_id)
    assert list(tokens.values()) == [each.token_ids for each in single]


def step_until_it_fails(engine: Engine) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        engine.core.step()


def test_a_killed_stage_fails_the_engine(folder: Path) -> None:
    with build_core(folder, pipeline_parallel_size=2, **CONFIG) as engine:
        for number in range(3):
            endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            engine.core.submit(request(str(number), [1, 2, 3], endless))
        for _ in range(8):
            engine.core.step()
        (worker,) = worker_pids()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(ExecutorFailed, match=r"rank 1 \(process \d+\) was killed by signal 9"):
            step_until_it_fails(engine)
