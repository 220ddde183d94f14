"""Greedy tokens equal those of `transformers` in float32, for every architecture and with every scheduling feature.

Tokens are compared as far as they are sure (`support.greedy`).
"""

import random
from pathlib import Path
from typing import Any

import pytest

from proa.contract import SamplingParams
from support.engine import build_core, request, run
from support.greedy import MARGIN, Expected, greedy
from support.tiny_models import ADAPTED_MIXERS, ARCHITECTURES, BYTES, LATENT, VOCAB_SIZE, make_tiny_model

ADAPTED = ("cohere2", "gpt_neox", "starcoder2", *ADAPTED_MIXERS)  # have no module of their own in the engine
NUM_PROMPTS = 20
NUM_TOKENS = 16

ALL_ON: dict[str, Any] = {
    "max_num_batched_tokens": 48,  # chunked prefill
    "num_gpu_blocks_override": 40,  # preemption
    "enable_prefix_caching": True,
    "async_scheduling": True,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "all on": ALL_ON,
    "no chunked prefill": ALL_ON | {"max_num_batched_tokens": 4096},
    "no preemption": ALL_ON | {"num_gpu_blocks_override": 1000},
    "no prefix caching": ALL_ON | {"enable_prefix_caching": False},
    "no async scheduling": ALL_ON | {"async_scheduling": False},
}


WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": WINDOWS,
    "gpt_oss": {},
    "gemma4_text": WINDOWS
    | {"global_head_dim": 32, "num_kv_shared_layers": 2}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE},
    "olmo3": WINDOWS,
    "qwen3_next": {},
    "qwen3_5_moe_text": {},
    "deepseek_v3": LATENT,
    "granitemoehybrid": {},
    "nemotron_h": {},
    "lfm2": {},
    "lfm2_moe": {},
}


def make_prompts() -> list[list[int]]:
    """Prompts of 1 to 90 tokens, some with a common prefix, one of them twice."""
    rows = random.Random(5)
    shared = rows.choices(range(BYTES), k=40)
    prompts = [rows.choices(range(BYTES), k=rows.randint(1, 90)) for _ in range(NUM_PROMPTS - 9)]
    prompts += [shared + rows.choices(range(BYTES), k=rows.randint(1, 20)) for _ in range(8)]
    return [*prompts, prompts[3]]


PROMPTS = make_prompts()


class Case:
    """A model, and the tokens of `transformers` once there are tokens to compare with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._expected: list[Expected] | None = None

    def expected(self, ours: list[list[int]]) -> list[Expected]:
        self._expected = self._expected or greedy(self.folder, PROMPTS, NUM_TOKENS, ours)
        return self._expected


@pytest.fixture(scope="module", params=[*ARCHITECTURES, "qwen3_5_text"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, seed=3))


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_tokens_of_other_families_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """With everything on; what differs between families is in their layers, not in the schedule."""
    folder = make_tiny_model(tmp_path / family, family, **({"seed": 3} | OTHER_FAMILIES[family]))
    check(Case(folder), "all on")


@pytest.mark.parametrize("setting", SETTINGS)
def test_batched_tokens_equal_those_of_transformers(case: Case, setting: str) -> None:
    check(case, setting)


@pytest.mark.parametrize("architecture", ADAPTED)
def test_tokens_of_models_that_transformers_runs(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture, seed=3)
    check(Case(folder), "all on")


def check(case: Case, setting: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    config = {"max_model_len": 128, "block_size": 8} | SETTINGS[setting]
    with build_core(case.folder, poison=True, block_seed=1, **config) as engine:
        results = run(engine, [request(str(index), prompt, params) for index, prompt in enumerate(PROMPTS)])
        stats = engine.core.stats()
        plans = engine.plans
    ours = [results[str(index)].token_ids for index in range(NUM_PROMPTS)]
    expected = case.expected(ours)
    for index, want in enumerate(expected):
        assert ours[index][: want.num_sure] == want.token_ids[: want.num_sure], f"prompt {index}"
    share = 1 - sum(want.num_sure for want in expected) / (NUM_PROMPTS * NUM_TOKENS)
    print(f"{case.folder.name}, {setting}: {share:.2%} of the steps come after a margin below {MARGIN}")
    assert share < 0.05
    assert (stats.num_preemptions > 0) == (setting != "no preemption")
    assert (stats.prefix_cache_hits > 0) == (setting != "no prefix caching")
    chunked = any(
        new.num_computed_tokens + plan.num_scheduled_tokens[new.request_id] < len(new.token_ids)
        for plan in plans
        for new in plan.new_requests
    )
    assert chunked == (setting != "no chunked prefill")
