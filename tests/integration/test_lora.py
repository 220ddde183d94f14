"""Adapters in an engine: tokens of mixed batches, loading beside requests, sleep, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from proa_engine.core.lora_store import LoraInvalid, LoraNotFound
from proa_engine.core.operations import LoadLora, Sleep, SleepLevel, UnloadLora, WakeUp
from proa_engine.json_configs import SpeculativeConfig
from support import adapters
from support.adapters import ADAPTERS, Generated, assert_equal, generate, lora_modules, operate, requests
from support.engine import build_core, run
from support.tiny_models import make_tiny_model

NAMES = ("", *(adapter.name for adapter in ADAPTERS))
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `model`, and one for each adapter."""
    folder = tmp_path_factory.mktemp("lora")
    make_tiny_model(folder / "model", "qwen3", seed=3)
    for seed, adapter in enumerate(ADAPTERS):
        adapters.write_adapter(folder / "model", folder / adapter.name, adapter, seed=seed)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Generated]:
    outputs = {each.name: generate(adapters.merged(folder / "model", folder / each.name, each)) for each in ADAPTERS}
    return {"": generate(adapters.load_plain(folder / "model"))} | outputs


@pytest.mark.parametrize("more", [{}, {"async_scheduling": False, "speculative_config": NGRAM}])
def test_tokens_equal_those_of_merged_weights_in_batches_of_several_adapters(
    folder: Path, expected: dict[str, Generated], more: dict[str, Any]
) -> None:
    config = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 40, "block_size": 8, "max_model_len": 128}
    modules = lora_modules(folder, *ADAPTERS)
    with build_core(
        folder / "model", poison=True, enable_lora=True, max_loras=2, lora_modules=modules, **config, **more
    ) as engine:
        results = run(engine, requests(NAMES))
        assert engine.core.stats().num_preemptions > 0
    assert_equal(results, expected)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_applied_after_sleep(folder: Path, expected: dict[str, Generated], level: SleepLevel) -> None:
    names = ("", "all")
    with build_core(folder / "model", enable_lora=True, lora_modules=lora_modules(folder, ADAPTERS[0])) as engine:
        run(engine, requests(names))
        operate(engine, Sleep(level))
        operate(engine, WakeUp())
        assert_equal(run(engine, requests(names)), {name: expected[name] for name in names})


def test_an_adapter_is_loaded_replaced_and_unloaded_while_the_engine_runs(
    folder: Path, expected: dict[str, Generated]
) -> None:
    with build_core(folder / "model", enable_lora=True) as engine:
        for name in ("some", "others"):
            lora = operate(engine, LoadLora("x", str(folder / name), replace=True))
            results = run(engine, requests(("x",)))
            assert_equal(results, {"x": expected[name]})
            assert lora.path == str(folder / name)
        operate(engine, UnloadLora("x"))
        assert list(engine.executor._worker.weights._loras._loaded) == [0], "its memory is freed"  # type: ignore[union-attr]


def copy_of(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of the adapter `some` with other fields."""
    to.mkdir()
    fields = json.loads((folder / "some" / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps(fields | config))
    (to / "adapter_model.safetensors").write_bytes((folder / "some" / "adapter_model.safetensors").read_bytes())
    return to


def test_what_is_not_supported_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "bias": "all",
        "use_dora": True,
        "modules_to_save": ["lm_head"],
        "peft_type": "IA3",
        "alpha_pattern": {"q_proj": 3},
        "init_lora_weights": "pissa_niter_4",
    }
    with build_core(folder / "model", enable_lora=True, max_lora_rank=8) as engine:
        for name, value in fields.items():
            with pytest.raises(LoraInvalid, match=name):
                operate(engine, LoadLora("x", str(copy_of(folder, tmp_path / name, **{name: value}))))
        with pytest.raises(LoraInvalid, match="rank 16; the most is 8"):
            operate(engine, LoadLora("x", str(folder / "others")))
        with pytest.raises(LoraNotFound, match="there is no adapter at"):
            operate(engine, LoadLora("x", str(tmp_path / "nowhere")))
        (tmp_path / "bias" / "adapter_model.safetensors").write_bytes(b"not safetensors")
        (tmp_path / "bias" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        with pytest.raises(LoraInvalid, match="not a readable safetensors file"):
            operate(engine, LoadLora("x", str(tmp_path / "bias")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.mlp.experts.1.up_proj.lora_A.weight", "layers.0.mlp.experts.1.up_proj, to which"),
        ("lm_head.lora_A.weight", "lm_head, to which"),
        ("model.embed_tokens.lora_embedding_A", "lora_embedding_A .* is not supported"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "lora_magnitude_vector .* is not supported"),
    ],
)
def test_modules_without_adapters_are_refused_by_name(folder: Path, tmp_path: Path, name: str, message: str) -> None:
    adapter = copy_of(folder, tmp_path / "x")
    tensors = load_file(adapter / "adapter_model.safetensors")
    a = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    save_file(tensors | {f"base_model.model.{name}": a.clone()}, adapter / "adapter_model.safetensors")
    with build_core(folder / "model", enable_lora=True) as engine, pytest.raises(LoraInvalid, match=message):
        operate(engine, LoadLora("x", str(adapter)))


def test_matrices_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    larger = make_tiny_model(tmp_path / "larger", "qwen3", intermediate_size=128)
    with build_core(larger, enable_lora=True) as engine, pytest.raises(LoraInvalid, match="has shape"):
        operate(engine, LoadLora("x", str(folder / "all")))
