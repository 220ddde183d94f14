"""Layers that propose a block of tokens at once (DFlash, DSpark) change no token: greedy and sampled, asynchronous or
not, with hits, chunks and preemption, replayed, with recurrent layers and windows, and on two ranks."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa.contract import SamplingParams
from proa_engine import LLM
from proa_engine.json_configs import SpeculativeConfig
from support.draft_requests import (
    BLOCK,
    CONFIG,
    SETTINGS,
    assert_same,
    prompt,
    replayed,
    requests,
    settings_of,
    whole,
)
from support.drafters import write_block
from support.engine import Engine, Result, build_core, request, run, tokens
from support.oracle_drafts import CHANGING
from support.scripted_drafts import scripted_drafts, seven_of_ten
from support.tiny_models import VOCAB_SIZE, make_tiny_model

Method = Literal["dflash", "dspark"]
METHODS: tuple[Method, ...] = ("dflash", "dspark")
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
_WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}


def drafts(folder: Path, num_speculative_tokens: int = 3, **options: Any) -> SpeculativeConfig:
    """Of a drafter in a folder of its method's name."""
    values = {"method": folder.name, "model": str(folder), "num_speculative_tokens": num_speculative_tokens}
    return SpeculativeConfig.from_mapping(values | options)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), "qwen3", seed=8)


@pytest.fixture(scope="module")
def folders(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Method, Path]:
    """DFlash's first layer has a window."""
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "dflash": write_block(folder / "dflash", target, layer=_WINDOW),
        "dspark": write_block(folder / "dspark", target, method="dspark", draft_ids=torch.arange(40, VOCAB_SIZE)),
    }


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Engine]:
    with build_core(target, **CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> dict[str, Result]:
    return run(plain, requests())


@pytest.mark.parametrize(
    ("method", "num_drafts", "is_async", "has_hits", "num_blocks"),
    [(method, *settings) for method, settings in zip(itertools.cycle(METHODS), SETTINGS, strict=False)],
)
def test_random_drafts_and_drafts_of_which_70_percent_are_right_change_no_token(
    target: Path,
    folders: dict[Method, Path],
    expected: dict[str, Result],
    method: Method,
    num_drafts: int,
    is_async: bool,
    has_hits: bool,
    num_blocks: int,
) -> None:
    settings = settings_of(is_async=is_async, has_hits=has_hits, num_blocks=num_blocks)
    settings |= {"speculative_config": drafts(folders[method], num_drafts)}
    with build_core(target, poison=True, **CONFIG, **settings) as engine:
        assert_same(run(engine, requests()), expected)
        with scripted_drafts(seven_of_ten(whole(expected, requests()))):
            before = engine.core.counters()
            results = run(engine, requests())
            stats, counters = engine.core.stats(), engine.core.counters()
    assert_same(results, expected)
    assert (stats.num_preemptions > 0) == (num_blocks == 60)
    if num_blocks > 60:  # of a pressed cache, few blocks are left, if any
        assert any(result.num_cached_tokens for result in results.values()) == has_hits
    first = counters.drafts.num_accepted_per_position[0] - before.drafts.num_accepted_per_position[0]
    assert 0.6 < first / (counters.drafts.num_drafts - before.drafts.num_drafts) < 0.8


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schedule", [None, CHANGING])
def test_tokens_equal_those_of_replayed_steps(
    target: Path, folders: dict[Method, Path], expected: dict[str, Result], method: Method, schedule: Any
) -> None:
    """One graph proposes and runs the model, a second one computes the drafter's entries."""
    config = drafts(folders[method], num_speculative_tokens_per_batch_size=schedule)
    with (
        replayed(3) as capture,
        scripted_drafts(seven_of_ten(whole(expected, requests()))),
        build_core(target, poison=True, max_num_seqs=4, speculative_config=config, **CONFIG) as engine,
    ):
        assert_same(run(engine, requests()), expected)
        assert engine.core.counters().drafts.num_accepted_tokens > 5
        assert capture.num_replays == capture.num_draws > len(engine.plans) / 4


@pytest.mark.parametrize("method", METHODS)
def test_rejected_drafts_leave_no_trace_in_the_drafters_cache(
    target: Path, folders: dict[Method, Path], plain: Engine, method: Method
) -> None:
    """Five drafts, all rejected, across a block's end: then the drafter chooses as for a new request with these
    tokens, which hits none of them or all but one."""
    start = prompt(6)[: 3 * BLOCK - 3]
    output = run(plain, [request("plain", start, GREEDY)])["plain"].token_ids
    right = {tuple([*start, *output[:count]]): token for count, token in enumerate(output)}
    settings = CONFIG | {"speculative_config": drafts(folders[method], 5)}
    with (
        scripted_drafts(lambda tokens, choice: (right.get(tokens, choice) + 1) % 200) as rejected,
        build_core(target, poison=True, **settings) as engine,
    ):
        assert run(engine, [request("drafted", start, GREEDY)])["drafted"].token_ids == output
        assert engine.core.counters().drafts.num_accepted_tokens == 0
    with (
        scripted_drafts(lambda tokens, choice: choice) as fresh,
        build_core(target, poison=True, **settings) as engine,
    ):
        for count in range(2, 20):  # the first token comes with the prompt
            known = tuple([*start, *output[:count]])
            for _ in range(2):
                fresh.clear()
                run(engine, [request("new", known[:-1], GREEDY)])
                assert fresh[known] == rejected[known]


@pytest.mark.parametrize("method", METHODS)
def test_recurrent_layers_and_other_heads_than_the_drafters(tmp_path: Path, method: Method) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3_5_text", seed=3)
    layer = {"head_dim": 16, "num_key_value_heads": 2, "rope_parameters": None}
    config = drafts(write_block(tmp_path / method, folder, method=method, layer=layer))
    with build_core(folder, **CONFIG) as engine:
        expected = run(engine, requests())
    with (
        scripted_drafts(seven_of_ten(whole(expected, requests()))),
        build_core(folder, poison=True, speculative_config=config, max_num_seqs=12, **CONFIG) as engine,
    ):
        for _ in range(2):
            assert tokens(run(engine, requests())) == tokens(expected)
        assert engine.core.counters().drafts.num_accepted_tokens > 100


def test_each_draft_of_dspark_follows_from_the_one_before(target: Path, tmp_path: Path) -> None:
    """With layers whose logits are zero and a Markov head of one bigram for each token."""
    folder = write_block(tmp_path / "dspark", target, "speculators", method="dspark", markov_rank=VOCAB_SIZE)
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"].zero_()
    weights["markov_head.markov_w1.weight"] = torch.eye(VOCAB_SIZE)
    weights["markov_head.markov_w2.weight"] = torch.eye(VOCAB_SIZE).roll(3, 0)
    save_file(weights, folder / "model.safetensors")
    with (
        scripted_drafts(lambda tokens, choice: choice) as choices,
        build_core(target, speculative_config=drafts(folder), **CONFIG) as engine,
    ):
        run(engine, requests()[:1])
    start = tuple(prompt(0))  # others are requests of the warm-up
    found = [known for known in choices if known[: len(start)] == start and len(known) < 18]  # of 23: with room
    assert len(found) > 20
    assert all(choices[known] == (known[-1] + 3) % VOCAB_SIZE for known in found)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_propose_and_accept_the_same_tokens(
    target: Path, folders: dict[Method, Path], expected: dict[str, Result], method: Method
) -> None:
    with build_core(target, tensor_parallel_size=2, speculative_config=drafts(folders[method]), **CONFIG) as engine:
        results = run(engine, requests()[:8])
        assert engine.core.counters().drafts.num_draft_tokens > 100
    equal = [result.token_ids == expected[name].token_ids for name, result in results.items()]
    assert sum(equal) >= len(equal) - 1  # the ranks' sums may round differently where two logits are close


def test_without_a_number_a_block_has_as_many_drafts_as_it_has_room_for(
    target: Path, folders: dict[Method, Path], expected: dict[str, Result]
) -> None:
    config = {"method": "dflash", "model": str(folders["dflash"])}
    llm = LLM(str(target), max_model_len=160, speculative_config=config)
    try:
        assert llm.llm_engine._core._scheduler.config.num_speculative_tokens == 5  # a block of six
        wanted = [each for each in requests() if not each.sampling_params.temperature][:4]
        prompts = [{"prompt_token_ids": each.prompt_token_ids} for each in wanted]
        outputs = llm.generate(prompts, [each.sampling_params for each in wanted], use_tqdm=False)
        assert [[*each.outputs[0].token_ids] for each in outputs] == [
            expected[each.request_id].token_ids for each in wanted
        ]
    finally:
        llm.llm_engine.shutdown()
