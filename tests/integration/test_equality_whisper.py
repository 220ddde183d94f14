"""Greedy tokens of Whisper equal those of `transformers`, alone, mixed, and with every scheduling feature."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine import LLM
from proa_engine.core.operations import Sleep, WakeUp
from proa_engine.json_configs import SpeculativeConfig
from support.adapters import operate
from support.engine import Engine, build_core, run
from support.greedy import Expected, check_tokens
from support.whisper_models import (
    PROMPT,
    RATE,
    TOKENS,
    aligned,
    check_alignment,
    greedy_transcriptions,
    make_whisper,
    tone,
    transcription,
)

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
AUDIOS = [tone(1), tone(2, 0.4), tone(3, 0.9), np.zeros(RATE, np.float32)]
TEXT = [random.Random(7).randrange(256) for _ in range(30)]
# Audios and prompts: without text before, and with one of several lengths. Several have the same audio.
CASES: list[tuple[np.ndarray, list[int]]] = [
    (AUDIOS[index % len(AUDIOS)], [TOKENS["startofprev"], *TEXT[:length], *PROMPT] if length else PROMPT)
    for index, length in enumerate((0, 0, 3, 30, 0, 17, 30, 0, 9, 30))
]
ALL_ON: dict[str, Any] = {
    "max_num_batched_tokens": 9,  # chunked prefill, and an audio in each step
    "num_gpu_blocks_override": 60,  # preemption: an audio has 13 blocks
    "enable_prefix_caching": True,
    "async_scheduling": True,
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "all on": ALL_ON,
    "drafts": ALL_ON | {"speculative_config": NGRAM},
    "room for one": ALL_ON | {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 29},
    "all off": {"enable_prefix_caching": False, "async_scheduling": False},
}


@dataclass(frozen=True)
class Case:
    folder: Path
    expected: list[Expected]

    def requests(self, name: str = "") -> list[EngineCoreRequest]:
        return [transcription(f"{name}{index}", *_of(index)) for index in range(len(CASES))]

    def check(self, engine: Engine, name: str = "") -> None:
        results = run(engine, self.requests(name))
        check_tokens([results[f"{name}{index}"].token_ids for index in range(len(CASES))], self.expected)


def _of(index: int) -> tuple[np.ndarray, SamplingParams, list[int]]:
    samples, prompt = CASES[index]
    return samples, PARAMS, prompt


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_whisper(tmp_path_factory.mktemp("audio") / "whisper")
    expected = greedy_transcriptions(folder, CASES, NUM_TOKENS)
    assert sum(each.num_sure for each in expected) > 0.9 * NUM_TOKENS * len(CASES)
    assert len({tuple(each.token_ids) for each in expected}) > len(AUDIOS)  # the audio decides
    return Case(folder, expected)


@pytest.mark.parametrize("setting", SETTINGS)
def test_batched_tokens_equal_those_of_transformers(case: Case, setting: str) -> None:
    settings = {"block_size": 4} | SETTINGS[setting]
    with build_core(case.folder, poison=True, block_seed=1, **settings) as engine:
        case.check(engine)
        stats, counters = engine.core.stats(), engine.core.counters()
    assert counters.audios.num_encoded + counters.audios.num_hits == len(CASES) + stats.num_preemptions
    assert (stats.num_preemptions > 0) == (setting != "all off")
    assert (counters.drafts.num_draft_tokens > 0) == ("speculative_config" in settings)


def test_tokens_alone_equal_those_of_transformers_and_an_audio_is_encoded_once_and_again_after_sleep(
    case: Case,
) -> None:
    with build_core(case.folder, block_size=4) as engine:
        for round in range(2):
            results = [run(engine, [wanted])[wanted.request_id] for wanted in case.requests(f"{round}-")]
            check_tokens([result.token_ids for result in results], case.expected)
            assert engine.core.counters().audios.num_encoded == len(AUDIOS) * (1 + round)
            assert results[-1].num_cached_tokens > 0  # of the third audio with the same text
            operate(engine, Sleep(2))
            operate(engine, WakeUp())


def test_the_offline_llm_takes_audio_as_vllm_does(case: Case) -> None:
    llm = LLM(model=str(case.folder), device="cpu", block_size=4)
    text = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    of_llm = [index for index, (_, prompt) in enumerate(CASES) if prompt is PROMPT]
    given = [{"prompt": text, "multi_modal_data": {"audio": (CASES[index][0], RATE)}} for index in of_llm]
    for index, output in zip(of_llm, llm.generate(given, params, use_tqdm=False), strict=True):
        expected = case.expected[index]
        assert list(output.prompt_token_ids or ()) == PROMPT
        assert list(output.outputs[0].token_ids[: expected.num_sure]) == expected.token_ids[: expected.num_sure]
    with pytest.raises(ValueError, match="exactly one audio, got 0"):
        llm.generate(text, params, use_tqdm=False)
    with pytest.raises(ValueError, match="the model reads audio of 16000 samples a second, got 8000"):
        llm.generate({"prompt": text, "multi_modal_data": {"audio": (AUDIOS[0], 8000)}}, params, use_tqdm=False)


@pytest.mark.parametrize("settings", [{}, ALL_ON])
def test_alignments_equal_those_of_transformers_beside_transcriptions(case: Case, settings: dict[str, Any]) -> None:
    kept = {f"aligned-{number}": number for number in (0, 45, 3)}
    requests = [
        aligned(name, AUDIOS[index], [*PROMPT, *TEXT[10 * index :]], number or None)
        for index, (name, number) in enumerate(kept.items())
    ]
    with build_core(case.folder, poison=True, block_seed=1, **{"block_size": 4} | settings) as engine:
        results = run(engine, [*requests, *case.requests()])
    check_tokens([results[str(index)].token_ids for index in range(len(CASES))], case.expected)
    for samples, request in zip(AUDIOS, requests, strict=False):
        check_alignment(case.folder, samples, request, results[request.request_id])
