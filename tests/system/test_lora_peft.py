"""Greedy tokens of requests with adapters equal those of `peft` in float32, in batches of several adapters and none."""

from pathlib import Path
from typing import Any

import pytest

from proa_engine.core.lora_store import LoraNotFound
from proa_engine.core.operations import LoadLora, Sleep, UnloadLora, WakeUp
from proa_engine.json_configs import SpeculativeConfig
from support import adapters
from support.adapters import (
    ADAPTERS,
    PROMPTS,
    Adapter,
    Generated,
    assert_equal,
    generate,
    lora_modules,
    operate,
    requests,
)
from support.engine import build_core, run
from support.tiny_models import make_tiny_model

FUSED = Adapter("fused", modules=("qkv_proj", "o_proj", "gate_up_proj"))
NAMES = ("", *(adapter.name for adapter in ADAPTERS))
PRESSED: dict[str, Any] = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 40, "max_loras": 2}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
SETTINGS: dict[str, dict[str, Any]] = {
    "pressed": PRESSED,
    "pressed, no async scheduling": PRESSED | {"async_scheduling": False},
    "pressed, drafts": PRESSED | {"speculative_config": NGRAM},
    "one adapter in a step": {"max_loras": 1},
    "all adapters in a step": {"max_loras": 4, "max_lora_rank": 30},
}
# The families of models, with the modules that their adapters have.
FAMILIES: dict[str, tuple[dict[str, Any], Adapter]] = {
    "llama": ({}, Adapter("a")),
    "qwen2": ({}, Adapter("a")),
    "phi3": ({}, FUSED),
    "gemma3_text": ({"num_hidden_layers": 2, "sliding_window": 24}, Adapter("a")),
    "olmo3": ({}, Adapter("a")),
    "qwen3_moe": ({}, Adapter("a", modules=("q_proj", "k_proj", "v_proj", "o_proj"))),
    "lfm2": ({}, Adapter("a", modules=("q_proj", "out_proj", "in_proj", "w1", "w2", "w3"))),
    "granitemoehybrid": (
        {"num_local_experts": 0},
        Adapter("a", modules=("q_proj", "in_proj", "out_proj", "input_linear", "output_linear")),
    ),
    "nemotron_h": ({}, Adapter("a", modules=("q_proj", "in_proj", "up_proj", "down_proj"))),
    "qwen3_next": ({}, Adapter("a", modules=("q_proj", "v_proj", "o_proj", "in_proj_qkvz", "out_proj"))),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `model`, and one for each adapter."""
    folder = tmp_path_factory.mktemp("lora")
    make_tiny_model(folder / "model", "qwen3", seed=3)
    for seed, adapter in enumerate(ADAPTERS):
        adapters.write_with_peft(folder / "model", folder / adapter.name, adapter, seed=seed)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Generated]:
    outputs = {name: generate(adapters.run_by_peft(folder / "model", folder / name)) for name in NAMES if name}
    outputs[""] = generate(adapters.load_plain(folder / "model"))
    assert len({tuple(tokens) for of_adapter in outputs.values() for tokens, _ in of_adapter}) == 4 * len(PROMPTS)
    return outputs


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_equal_those_of_peft_in_batches_of_several_adapters(
    folder: Path, expected: dict[str, Generated], setting: str
) -> None:
    config: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "lora_modules": lora_modules(folder, *ADAPTERS)}
    with build_core(folder / "model", poison=True, enable_lora=True, **config | SETTINGS[setting]) as engine:
        results = run(engine, requests(NAMES))
        stats, counters = engine.core.stats(), engine.core.counters()
    assert_equal(results, expected)
    assert (stats.num_preemptions > 0) is ("pressed" in setting)
    assert (stats.prefix_cache_hits > 0) is ("pressed" in setting), "others start all requests in the first step"
    assert (counters.drafts.num_draft_tokens > 0) is ("drafts" in setting)


def test_merged_weights_give_the_same_tokens(folder: Path, expected: dict[str, Generated]) -> None:
    for name in NAMES[1:]:
        merged = generate(adapters.run_by_peft(folder / "model", folder / name, merge=True))
        for (token_ids, num_sure), (separate, _) in zip(merged, expected[name], strict=True):
            assert token_ids[:num_sure] == separate[:num_sure]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_families_equal_those_of_peft(family: str, tmp_path: Path) -> None:
    fields, adapter = FAMILIES[family]
    model = make_tiny_model(tmp_path / "model", family, seed=3, **fields)
    adapters.write_with_peft(model, tmp_path / adapter.name, adapter)
    with build_core(model, enable_lora=True, lora_modules=lora_modules(tmp_path, adapter)) as engine:
        results = run(engine, requests(("", adapter.name)))
    expected = generate(adapters.run_by_peft(model, tmp_path / adapter.name))
    assert_equal(results, {"": generate(adapters.load_plain(model)), adapter.name: expected})


@pytest.mark.parametrize("num_ranks", [2, 4])  # four: each KV head is on two ranks
def test_ranks_give_the_tokens_of_peft_and_refuse_together(
    folder: Path, expected: dict[str, Generated], num_ranks: int, tmp_path: Path
) -> None:
    with build_core(folder / "model", enable_lora=True, tensor_parallel_size=num_ranks, max_loras=2) as engine:
        with pytest.raises(LoraNotFound):
            operate(engine, LoadLora("missing", str(tmp_path)))
        for name in NAMES[1:]:
            assert operate(engine, LoadLora(name, str(folder / name))).digest
        assert_equal(run(engine, requests(NAMES)), expected)
        operate(engine, Sleep(2))
        operate(engine, WakeUp())
        operate(engine, UnloadLora("some"))
        names = ("", "all", "others")
        assert_equal(run(engine, requests(names)), {name: expected[name] for name in names})
