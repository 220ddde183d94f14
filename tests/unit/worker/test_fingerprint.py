"""What engines must have in common to exchange blocks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine.builtin import builtin_model_folder
from proa_engine.config import EngineConfig
from proa_engine.layers.cache_layers import KeyValueLayer
from proa_engine.memory.cache_plan import plan_caches
from proa_engine.memory.fingerprint import cache_fingerprint
from proa_engine.option_groups import KvTiers
from proa_engine.worker.worker import Worker
from support.tiny_models import make_tiny_model

LAYERS = [KeyValueLayer(2, 64), KeyValueLayer(2, 64)]
PLAN = plan_caches(LAYERS, 16, torch.float32, 512)


def fingerprint(**changed: Any) -> bytes:
    layers, plan = changed.pop("layers", LAYERS), changed.pop("plan", PLAN)
    folder, weights = changed.pop("folder", builtin_model_folder()), changed.pop("weights", b"digest")
    others = {
        "dtype": changed.pop("activations", torch.float32),
        "cache_dtype": changed.pop("cache_dtype", torch.float32),
        "num_positions": changed.pop("num_positions", 512),
        "device": torch.device("cpu"),
    }
    config = EngineConfig.from_options(**{"model": "builtin", **changed})
    return cache_fingerprint(config, folder, weights, layers, plan, **others)


def test_two_engines_of_one_configuration_have_the_same() -> None:
    assert fingerprint() == fingerprint(max_num_seqs=3, kv_offloading_size=1.0)
    assert len(fingerprint()) == 32


def test_types_are_compared_not_the_options_that_choose_them(tmp_path: Path) -> None:
    assert fingerprint(dtype="float32", kv_cache_dtype="float32") == fingerprint()
    eight_bits = {"cache_dtype": torch.float8_e4m3fn}
    assert fingerprint(kv_cache_dtype="fp8", **eight_bits) == fingerprint(**eight_bits) != fingerprint()
    folder = make_tiny_model(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    assert fingerprint(folder=folder, quantization="fp8") == fingerprint(folder=folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "/other"},
        {"revision": "other"},
        {"weights": b"other"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        {"activations": torch.bfloat16},
        {"quantization": "fp8"},
        {"batch_invariant": True},
        {"tensor_parallel_size": 2},
        {"enable_expert_parallel": True},
        {"hf_overrides": {"rope_parameters": {"factor": 2.0}}},
        {"layers": LAYERS[:1]},
        {"layers": [replace(LAYERS[0], window=32), LAYERS[1]]},
        {"plan": replace(PLAN, block_size=32)},
        {"plan": replace(PLAN, block_bytes=1)},
        {"cache_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_engines_that_differ_have_different_ones(changed: dict[str, Any]) -> None:
    assert fingerprint(**changed) != fingerprint()


def test_a_byte_changed_in_the_configuration_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    found = {fingerprint(folder=folder)}
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    found.add(fingerprint(folder=folder))
    (folder / "hf_quant_config.json").write_text("{}")
    found.add(fingerprint(folder=folder))
    assert len(found) == 3


def test_engines_whose_lengths_choose_other_rotary_factors_have_different_ones(tmp_path: Path) -> None:
    assert fingerprint(num_positions=256) == fingerprint()
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    sizes: dict[str, Any] = {"max_position_embeddings": 512, "original_max_position_embeddings": 256}
    folder = make_tiny_model(tmp_path / "model", "phi3", rope_parameters=rope, **sizes)
    assert fingerprint(folder=folder, num_positions=256) != fingerprint(folder=folder)


def test_dummy_weights_are_those_of_their_seed_and_of_the_device_that_draws_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dummy = fingerprint(load_format="dummy")
    assert fingerprint(load_format="dummy", weights=b"other") == dummy
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert fingerprint(load_format="dummy") != dummy


def test_weights_that_changed_while_the_engine_slept_are_refused_if_its_blocks_outlive_it(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    path = folder / "model.safetensors"
    before, host = path.read_bytes(), tmp_path / "host"
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        max_model_len=64,
        kv_tiers=KvTiers(kv_offloading_size=0.01, kv_offloading_path=str(host)),
    )
    worker = Worker(config, 0, lambda _: None)
    worker.init_device()
    worker.load_model()
    worker.sleep(2)
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"the weights in .* have changed since the engine started"):
        worker.wake_up()
