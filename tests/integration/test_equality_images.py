"""Greedy tokens behind images equal those of `transformers`, alone, mixed, and with every scheduling feature."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa_engine.core.operations import Sleep, WakeUp
from proa_engine.json_configs import SpeculativeConfig
from support.adapters import operate
from support.engine import build_core, run
from support.image_chats import CHATS, PARAMS, Case, image_input_of, make_case
from support.image_models import make_image_model

ALL_ON: dict[str, Any] = {
    "max_num_batched_tokens": 40,  # chunked prefill
    "num_gpu_blocks_override": 46,  # preemption
    "enable_prefix_caching": True,
    "async_scheduling": True,
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "all on": ALL_ON,
    "drafts": ALL_ON | {"speculative_config": NGRAM},
    "chunks within images, few of which fit": ALL_ON | {"max_num_batched_tokens": 7, "encoder_cache_size": 64},
    "all off": ALL_ON | {"max_num_batched_tokens": 4096, "enable_prefix_caching": False, "async_scheduling": False},
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(make_image_model(tmp_path_factory.mktemp("images") / "qwen3_vl", "qwen3_vl", seed=1))


@pytest.mark.parametrize("setting", SETTINGS)
def test_batched_tokens_equal_those_of_transformers(case: Case, setting: str) -> None:
    settings = {"max_model_len": 140, "block_size": 4} | SETTINGS[setting]
    with build_core(case.folder, poison=True, block_seed=1, **settings) as engine:
        case.check(case.generate(engine))
        stats, counters = engine.core.stats(), engine.core.counters()
    assert stats.num_preemptions > 0 or setting == "drafts"
    assert (stats.prefix_cache_hits > 0) == settings["enable_prefix_caching"]
    assert (counters.drafts.num_draft_tokens > 0) == ("speculative_config" in settings)


def test_tokens_of_a_recurrent_model_equal_those_of_transformers(tmp_path: Path) -> None:
    case = make_case(make_image_model(tmp_path, "qwen3_5_moe", seed=1))
    with build_core(case.folder, poison=True, block_seed=1, max_model_len=140, block_size=4, **ALL_ON) as engine:
        case.check(case.generate(engine))
        assert engine.core.stats().prefix_cache_hits > 0


def test_log_probabilities_alone_have_the_bits_of_those_in_a_batch(case: Case) -> None:
    """Also where chunks end within images."""
    params = replace(PARAMS, logprobs=2)
    with build_core(case.folder, max_model_len=256, max_num_batched_tokens=40, enable_prefix_caching=False) as engine:
        requests = [
            replace(case.request(index, image_input_of(engine)), sampling_params=params) for index in range(len(CHATS))
        ]
        together = run(engine, requests)
        for wanted in requests:
            alone = run(engine, [wanted])[wanted.request_id]
            assert alone.token_ids == together[wanted.request_id].token_ids
            assert alone.logprobs == together[wanted.request_id].logprobs


def test_each_image_is_encoded_once_and_again_after_sleep(case: Case) -> None:
    with build_core(case.folder, max_model_len=256) as engine:
        case.check(case.generate(engine))
        num_images = len({id(image) for chat in CHATS for image in chat.images})
        assert sum(len(plan.encoder_inputs) for plan in engine.plans) == num_images
        operate(engine, Sleep(2))
        operate(engine, WakeUp())
        case.check(case.generate(engine))
        assert sum(len(plan.encoder_inputs) for plan in engine.plans) == 2 * num_images
