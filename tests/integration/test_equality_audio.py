"""Greedy tokens behind audio in prompts equal those of `transformers`, mixed and with every scheduling feature."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proa.contract import SamplingParams
from proa_engine import LLM
from proa_engine.core.operations import Sleep, WakeUp
from proa_engine.json_configs import SpeculativeConfig
from support.adapters import operate
from support.audio_prompt_models import (
    AUDIO_TOKEN,
    greedy_with_audio,
    make_qwen2_audio,
    make_qwen3_asr,
    qwen2_audio_tokens,
    qwen3_asr_tokens,
    run_with_audio,
    split,
)
from support.engine import Engine, build_core
from support.greedy import Expected, check_tokens
from support.whisper_models import RATE, tone

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
A, B, SHORT = tone(1), tone(2, 0.77), tone(3, 0.05)
TWICE = (AUDIO_TOKEN, AUDIO_TOKEN)
ROWS = random.Random(5)


def text(count: int) -> list[int]:
    return ROWS.choices(range(256), k=count)


STEM = text(9)
# Without audio, with one, with several, with the same one twice, and twice the same prompt.
PARTS: list[list[int | np.ndarray]] = [
    [*text(20)],
    [*STEM, A, *text(5)],
    [*STEM, A, 7, B, *text(3)],
    [SHORT, *text(4), SHORT, 1],
    [*STEM, A, 7, B, 5],
    [*STEM, A, 7, B, 5],
]
ALL_ON: dict[str, Any] = {
    "max_num_batched_tokens": 40,  # chunked prefill
    "num_gpu_blocks_override": 30,  # preemption
    "enable_prefix_caching": True,
    "async_scheduling": True,
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "all on": ALL_ON,
    "drafts": ALL_ON | {"speculative_config": NGRAM},
    "chunks within audios, few of which fit": ALL_ON | {"max_num_batched_tokens": 7, "encoder_cache_size": 30},
    "all off": {"enable_prefix_caching": False, "async_scheduling": False},
}


@dataclass(frozen=True)
class Case:
    folder: Path
    expected: list[Expected]

    def run(self, engine: Engine) -> None:
        check_tokens(run_with_audio(engine, PARTS, PARAMS), self.expected)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_qwen2_audio(tmp_path_factory.mktemp("audio") / "qwen2_audio")
    expected = greedy_with_audio(folder, [split(parts) for parts in PARTS], NUM_TOKENS)
    assert sum(each.num_sure for each in expected) > 0.9 * NUM_TOKENS * len(PARTS)
    return Case(folder, expected)


@pytest.mark.parametrize("setting", SETTINGS)
def test_batched_tokens_equal_those_of_transformers(case: Case, setting: str) -> None:
    settings = {"max_model_len": 100, "block_size": 4} | SETTINGS[setting]
    with build_core(case.folder, poison=True, block_seed=1, **settings) as engine:
        case.run(engine)
        stats, counters = engine.core.stats(), engine.core.counters()
    assert stats.num_preemptions > 0 or setting != "all on"
    assert counters.audios.num_encoded >= 3
    assert (counters.images.num_encoded, counters.audios.num_hits > 0) == (0, True)
    assert (stats.prefix_cache_hits > 0) == (setting != "all off")


def test_tokens_behind_seconds_of_audio_equal_those_of_qwen3_asr(tmp_path: Path) -> None:
    long = tone(4, 2.3)  # two windows of its encoder's attention
    parts: list[list[int | np.ndarray]] = [[*STEM, long, *text(5)], [*STEM, long, 7, SHORT, *text(3)], [B, *text(4)]]
    folder = make_qwen3_asr(tmp_path / "qwen3_asr")
    expected = greedy_with_audio(folder, [split(each, qwen3_asr_tokens) for each in parts], NUM_TOKENS)
    assert sum(each.num_sure for each in expected) > 0.9 * NUM_TOKENS * len(parts)
    settings = ALL_ON | {"max_num_batched_tokens": 25}
    with build_core(folder, max_model_len=100, block_size=4, poison=True, block_seed=1, **settings) as engine:
        check_tokens(run_with_audio(engine, parts, PARAMS, qwen3_asr_tokens), expected)


def test_each_audio_is_encoded_once_and_again_after_sleep(case: Case) -> None:
    with build_core(case.folder, max_model_len=100) as engine:
        for round in range(2):
            case.run(engine)
            assert sum(len(plan.encoder_inputs) for plan in engine.plans) == 3 * (1 + round)
            operate(engine, Sleep(2))
            operate(engine, WakeUp())


def test_blocks_with_audio_return_from_host_memory(case: Case) -> None:
    settings = ALL_ON | {
        "max_model_len": 68,
        "block_size": 4,
        "num_gpu_blocks_override": 18,
        "kv_offloading_size": 0.02,
    }
    with build_core(case.folder, poison=True, block_seed=1, **settings) as engine:
        for _ in range(3):
            for parts, expected in zip(PARTS, case.expected, strict=True):
                check_tokens(run_with_audio(engine, [parts], PARAMS), [expected])
        host = engine.core.counters().cache.host
    assert host is not None
    assert host.num_loaded_tokens > 40  # more than the text has twice


def test_the_offline_llm_replaces_placeholders_by_audio(case: Case) -> None:
    llm = LLM(model=str(case.folder), device="cpu", max_model_len=100)
    for index in (1, 2):
        prompt, audios = split(PARTS[index])
        once = [each for each, before in zip(prompt, [-1, *prompt], strict=False) if (each, before) != TWICE]
        given = {"prompt_token_ids": once, "multi_modal_data": {"audio": [(each, RATE) for each in audios]}}
        (output,) = llm.generate(given, PARAMS, use_tqdm=False)
        expected = case.expected[index]
        assert list(output.prompt_token_ids or ()) == prompt
        assert list(output.outputs[0].token_ids[: expected.num_sure]) == expected.token_ids[: expected.num_sure]
    (output,) = llm.generate(
        {"prompt": "a<|AUDIO|>b", "multi_modal_data": {"audio": (A, RATE)}}, PARAMS, use_tqdm=False
    )
    assert list(output.prompt_token_ids or ()) == [ord("a"), *[AUDIO_TOKEN] * qwen2_audio_tokens(A), ord("b")]
    with pytest.raises(ValueError, match=r"1 times .* which stands for an audio, but 2 audios"):
        llm.generate({"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": [(A, RATE)] * 2}}, use_tqdm=False)
