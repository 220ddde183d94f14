"""Drafts change no token of a model with recurrent layers, whose states cannot take back a rejected one: n-grams and
drafts of which most are right, numbers of drafts that vary, chunks, hits, preemption, replayed graphs and two ranks."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.step.decode_graphs import graph_shapes
from proa_engine.worker.worker import Worker
from support.drafters import write_eagle3
from support.engine import Engine, build_core, request, run, tokens
from support.fake_grammar import constrained
from support.oracle_drafts import CHANGING, oracle_drafts, varied_room
from support.runner import FakeCapture
from support.scripted_drafts import scripted_drafts, seven_of_ten
from support.thorough import combinations
from support.tiny_models import VOCAB_SIZE, make_tiny_model

CONFIG: dict[str, Any] = {"max_model_len": 130, "block_size": 8, "max_num_batched_tokens": 48, "block_seed": 4}
FEW = tuple(range(70, 74))  # with so few tokens an output repeats itself
NUM_BLOCKS = 36  # of which not all requests that may run have room


def requests() -> list[EngineCoreRequest]:
    """Requests whose prompts have one token, end with a block, are computed in chunks, or share a prefix."""
    wanted = []
    for index, length in enumerate([1, 2, 9, 16, 17, 33, 48, 49, 64, 100, 97, 96, 40, 41]):
        prompt = [(place * 7 + (index if place >= 40 else index % 3) * 31) % 250 for place in range(length)]
        params = SamplingParams(
            temperature=float(index % 2),
            max_tokens=20 + index % 7 if index != 9 else None,  # one ends with the context
            key=index,
            ignore_eos=True,
            allowed_token_ids=FEW if index % 4 < 2 else (),
        )
        wanted.append(request(str(index), prompt, params))
    return wanted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("speculation"), "qwen3_5_text", seed=3)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    with build_core(folder, **CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> dict[str, list[int]]:
    return tokens(run(plain, requests()))


@contextmanager
def drafting(
    folder: Path, num_drafts: int, schedule: Sequence[Sequence[int]] | None = None, **settings: Any
) -> Iterator[Engine]:
    """An engine whose memory, that of kept inputs too, begins as NaN."""
    drafts = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        num_speculative_tokens_per_batch_size=schedule,
        prompt_lookup_max=3,
    )
    with build_core(folder, poison=True, speculative_config=drafts, **CONFIG | settings) as engine:
        for cache in engine.executor._worker.model_runner.caches:
            for kept in cache.kept:
                assert kept.shape[1] == 1 + num_drafts
                kept.fill_(torch.nan)
        yield engine


def check_equal(engine: Engine, expected: Mapping[str, list[int]], *, least: int) -> None:
    """Run the requests twice, the second time as hits. At least `least` drafts are accepted."""
    for _ in range(2):
        assert tokens(run(engine, requests())) == expected
    counters = engine.core.counters()
    assert least <= counters.drafts.num_accepted_tokens < counters.drafts.num_draft_tokens


@pytest.mark.parametrize(
    ("num_drafts", "is_oracle", "async_scheduling"), list(combinations([1, 3, 5], [True, False], [True, False]))
)
def test_tokens_equal_those_without_drafts(
    folder: Path,
    plain: Engine,
    expected: dict[str, list[int]],
    num_drafts: int,
    is_oracle: bool,
    async_scheduling: bool,
) -> None:
    before = plain.core.stats().prefix_cache_hits
    run(plain, requests())
    num_hits = plain.core.stats().prefix_cache_hits - before
    drafter = oracle_drafts(requests(), expected) if is_oracle else nullcontext()
    with drafter, drafting(folder, num_drafts, async_scheduling=async_scheduling) as engine:
        check_equal(engine, expected, least=100 if is_oracle else 20)
        assert 0.9 * num_hits < engine.core.stats().prefix_cache_hits


@pytest.mark.parametrize("num_gpu_blocks_override", [None, NUM_BLOCKS])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_tokens_under_grammars_equal_those_without_drafts(
    folder: Path, num_gpu_blocks_override: int | None, async_scheduling: bool
) -> None:
    """With tokens that the grammars force, which are computed without being sampled, and those of drafts."""
    wanted, grammars = constrained(requests(), VOCAB_SIZE)
    with build_core(folder, grammars=grammars, **CONFIG) as engine:
        expected = tokens(run(engine, wanted))
    settings: dict[str, Any] = {
        "async_scheduling": async_scheduling,
        "num_gpu_blocks_override": num_gpu_blocks_override,
    }
    with (
        oracle_drafts(wanted, expected, varies=True),
        varied_room(),
        drafting(folder, 4, grammars=grammars, **settings) as engine,
    ):
        for _ in range(2):
            assert tokens(run(engine, wanted)) == expected
        stats, counters = engine.core.stats(), engine.core.counters()
        assert counters.num_forced_tokens > 50
        assert 40 < counters.drafts.num_accepted_tokens < counters.drafts.num_draft_tokens
        assert (stats.num_preemptions > 0) == (num_gpu_blocks_override is not None)


@pytest.mark.parametrize("family", ["lfm2", "nemotron_h"])
def test_tokens_of_other_recurrent_layers_equal_those_without_drafts(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family, seed=3)
    with build_core(folder, **CONFIG) as engine:
        expected = tokens(run(engine, requests()))
    with oracle_drafts(requests(), expected, varies=True), varied_room(), drafting(folder, 3) as engine:
        check_equal(engine, expected, least=40)


@pytest.mark.parametrize(
    ("settings", "async_scheduling"),
    [
        *combinations(
            [
                {},
                {"num_gpu_blocks_override": NUM_BLOCKS},
                {"enable_prefix_caching": False},
                {"max_num_seqs": 3, "max_num_batched_tokens": 9},
            ],
            [True, False],
        )
    ],
)
def test_numbers_of_drafts_that_vary_by_row_and_step(
    folder: Path, expected: dict[str, list[int]], settings: dict[str, Any], async_scheduling: bool
) -> None:
    with (
        oracle_drafts(requests(), expected, varies=True),
        varied_room(),
        drafting(folder, 5, async_scheduling=async_scheduling, **settings) as engine,
    ):
        check_equal(engine, expected, least=40)
        assert (engine.core.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in settings)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_tokens_are_the_same_where_the_number_of_drafts_follows_the_load(
    folder: Path, expected: dict[str, list[int]], async_scheduling: bool
) -> None:
    with (
        oracle_drafts(requests(), expected),
        drafting(folder, 3, CHANGING, async_scheduling=async_scheduling, max_num_seqs=7) as engine,
    ):
        check_equal(engine, expected, least=40)
        assert any(len(plan.decode_request_ids) - len(plan.cached_requests) >= 4 for plan in engine.plans)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_tokens_equal_those_of_replayed_steps(
    folder: Path, expected: dict[str, list[int]], async_scheduling: bool
) -> None:
    shapes, capture = graph_shapes(4, 3), FakeCapture()
    with (
        mock.patch.object(Worker, "_graph_shapes", return_value=shapes),
        mock.patch.object(Worker, "_graph_capture", return_value=capture),
        oracle_drafts(requests(), expected, varies=True),
        varied_room(),
        drafting(folder, 3, async_scheduling=async_scheduling, max_num_seqs=4) as engine,
    ):
        check_equal(engine, expected, least=40)
        assert capture.num_replays > len(engine.plans) / 4


def test_stop_token_inside_accepted_drafts_while_a_step_is_in_flight(
    folder: Path, plain: Engine, expected: dict[str, list[int]]
) -> None:
    rng = random.Random(5)
    stopped, outputs = [], {}
    for wanted in requests():
        output = expected[wanted.request_id]
        place = rng.randrange(3, len(output))
        params = SamplingParams(
            temperature=wanted.sampling_params.temperature,
            max_tokens=60,
            key=wanted.sampling_params.key,
            ignore_eos=True,
            allowed_token_ids=wanted.sampling_params.allowed_token_ids,
            stop_token_ids=(output[place],),
        )
        stopped.append(request(wanted.request_id, wanted.prompt_token_ids, params))
        outputs[wanted.request_id] = output[: output.index(output[place]) + 1]
    later = [
        request(f"{name} goes on", [*prompt, *outputs[name], 5], SamplingParams(temperature=0, max_tokens=9))
        for name, prompt in ((each.request_id, each.prompt_token_ids) for each in stopped)
    ]
    goes_on = tokens(run(plain, later))
    with oracle_drafts(requests(), expected, 1.0), drafting(folder, 5, max_num_seqs=2) as engine:
        assert tokens(run(engine, stopped)) == outputs
        with oracle_drafts(later, goes_on, 1.0):
            assert tokens(run(engine, later)) == goes_on


def test_preempted_and_resumed_on_another_engine(folder: Path, expected: dict[str, list[int]]) -> None:
    resumed = [
        request(each.request_id, each.prompt_token_ids, each.sampling_params, resumed=expected[each.request_id][:count])
        for count, each in enumerate(requests(), start=1)
    ]
    with oracle_drafts(requests(), expected), drafting(folder, 3) as engine:
        results = tokens(run(engine, resumed))
    assert results == {name: expected[name][count:] for count, name in enumerate(expected, start=1)}


def test_a_drafter_that_reads_hidden_states_beside_recurrent_layers(
    folder: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    drafter = write_eagle3(tmp_path, folder, layer={"rope_parameters": rope})
    drafts = SpeculativeConfig(method="eagle3", model=str(drafter), num_speculative_tokens=3)
    sequences = {each.request_id: [*each.prompt_token_ids, *expected[each.request_id]] for each in requests()}
    with (
        scripted_drafts(seven_of_ten(sequences)),
        build_core(folder, poison=True, speculative_config=drafts, **CONFIG) as engine,
    ):
        check_equal(engine, expected, least=100)


def test_two_ranks_accept_the_same_drafts(folder: Path, expected: dict[str, list[int]]) -> None:
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    with build_core(folder, tensor_parallel_size=2, speculative_config=drafts, **CONFIG) as engine:
        results = tokens(run(engine, requests()))
        assert engine.core.counters().drafts.num_accepted_tokens > 10
    equal = [output == expected[name] for name, output in results.items()]
    assert sum(equal) >= len(equal) - 1  # the ranks' sums may round differently where two logits are close
