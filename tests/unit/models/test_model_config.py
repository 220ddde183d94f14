"""Supported fields of config.json, and the errors for unsupported ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine.layers.rotary import RopeConfig
from proa_engine.models import read_config
from proa_engine.sources.folders import stored_dtype, text_fields


def config(**overrides: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
    }
    return settings | overrides


def layers(settings: dict[str, Any]) -> list[Any]:
    return list(read_config.from_dicts(settings, {}).layers)


def rope(settings: dict[str, Any]) -> RopeConfig:
    ropes: set[RopeConfig] = {layer.attention.rope for layer in layers(settings)}
    [only] = ropes
    return only


def test_defaults_are_filled_in() -> None:
    model = read_config.from_dicts(config(), {})
    [attention] = {layer.attention for layer in layers(config())}
    assert (attention.num_kv_heads, attention.head_dim, attention.window) == (4, 16, None)
    assert (model.torch_dtype, model.eos_token_ids, model.tie_word_embeddings) == (torch.float32, (), False)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("prefix", ["", "torch."])
def test_the_type_of_weights_may_have_torchs_name(name: str, prefix: str) -> None:
    fields = {key: value for key, value in config().items() if key not in ("dtype", "torch_dtype")}
    assert stored_dtype(fields | {name: f"{prefix}bfloat16"}) == "bfloat16"
    nested = text_fields({"text_config": {name: f"{prefix}float16"}, name: f"{prefix}bfloat16"})
    assert stored_dtype(nested) == "float16"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"architectures": ["UnknownForCausalLM"]},
            r"UnknownForCausalLM is not supported; docs/models\.md lists what is supported",
        ),
        ({"architectures": []}, "architectures in config.json must be a list with a name"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantization exl2 is not supported; supported: none, "),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt e5m2 is not supported; supported: e4m3"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"weight_block_size \[64, 64\] is not supported; supported: \[128, 128\]",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}},
            "format marlin-24 is not supported; supported: float-quantized",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 is not supported with rope scaling linear",
        ),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope scaling ntk is not supported; supported: default"),
        ({"hidden_act": "gelu"}, "activation gelu is not supported"),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"}, "activation gelu is not supported"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention True is not supported; supported: False",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0 is not supported; supported: none",
        ),
        (
            {"architectures": ["Olmo3ForCausalLM"], "layer_types": ["chunked_attention"] * 3},
            "layer type chunked_attention is not supported",
        ),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_config.from_dicts(config(**overrides), {})


@pytest.mark.parametrize(
    ("overrides", "wanted", "words"),
    [
        ({}, "gptq", "quantization gptq needs a checkpoint of that format; this one is not quantized"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "awq",
            "quantization awq does not fit the checkpoint, which is quantized by fp8",
        ),
    ],
)
def test_a_quantization_that_the_checkpoint_has_not_is_refused(
    overrides: dict[str, Any], wanted: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read_config.from_dicts(config(**overrides), {}, wanted)


def test_old_and_new_rope_fields_mean_the_same() -> None:
    old = config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    new = config(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0})
    assert rope(old) == rope(new)


def test_yarn_without_original_length_extends_the_models_own() -> None:
    assert rope(config(rope_scaling={"rope_type": "yarn", "factor": 4.0})).original_max_position_embeddings == 2048


def test_end_tokens_of_the_generation_config_win() -> None:
    assert read_config.from_dicts(config(eos_token_id=1), {"eos_token_id": [2, 3]}).eos_token_ids == (2, 3)
    assert read_config.from_dicts(config(eos_token_id=1), {}).eos_token_ids == (1,)


def windows(settings: dict[str, Any]) -> list[int | None]:
    return [layer.attention.window for layer in layers(settings)]


def test_sliding_windows_by_layer() -> None:
    assert windows(config(architectures=["MistralForCausalLM"], sliding_window=8)) == [8, 8, 8]
    qwen = config(architectures=["Qwen2ForCausalLM"], sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert windows(qwen) == [None, None, 8]
    assert windows(qwen | {"use_sliding_window": False}) == [None, None, None]


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a model folder: it is empty"):
        read_config.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert read_config.from_folder(tmp_path).architecture == "LlamaForCausalLM"
