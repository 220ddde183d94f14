"""Each `quantization_config` that a quantizer writes is supported, or refused by a sentence that names what to use."""

from typing import Any

import pytest

from proa_engine.models.quantization.formats import (
    Fp8Format,
    GptqFormat,
    OnlineFp8Format,
    PackQuantizedFormat,
    Quantization,
)
from proa_engine.models.quantization.methods import linear_method
from proa_engine.models.quantization.read import read_quantization

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
INT8_TOKEN = INT8 | {"strategy": "token", "dynamic": True}
FP8_TENSOR = FP8 | {"strategy": "tensor"}
FP8_TOKEN = FP8 | {"strategy": "token", "dynamic": True}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
MXFP4 = FP4 | {"strategy": "group", "group_size": 32}


def compressed_tensors(
    weights: dict[str, Any] | None, inputs: dict[str, Any] | None, stored_as: str, **more: Any
) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None}
    return common | {"format": stored_as, "ignore": ["lm_head"], "config_groups": {"group_0": group}} | more


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """As ModelOpt writes it into config.json."""
    common = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return common | {"producer": {"name": "modelopt", "version": "0.47.0"}} | more


def modelopt_file(algorithm: str, **more: Any) -> dict[str, Any]:
    """As in its hf_quant_config.json."""
    fields = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]} | more
    return {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": fields}


def gptq(**more: Any) -> dict[str, Any]:
    """As GPTQModel writes it."""
    common = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
    return common | {"pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:4.0"], "damp_percent": 0.05}} | more


def awq(**more: Any) -> dict[str, Any]:
    """As AutoAWQ writes it."""
    return {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True} | more


def auto_round(**more: Any) -> dict[str, Any]:
    common = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int", "sym": True}
    return common | {"bits": 4, "group_size": 128, "autoround_version": "0.9.0", "iters": 200} | more


def mixed(**targets: tuple[dict[str, Any], dict[str, Any] | None, str]) -> dict[str, Any]:
    """compressed-tensors with a group for each target: its weights, inputs and format."""
    groups = {
        f"group_{number}": {"targets": [target], "weights": weights, "input_activations": inputs, "format": stored_as}
        for number, (target, (weights, inputs, stored_as)) in enumerate(targets.items())
    }
    return compressed_tensors(None, None, "mixed-precision", config_groups=groups)


MODELOPT_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "actorder": None}
BITSANDBYTES = {"quant_method": "bitsandbytes", "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None}

SUPPORTED: dict[str, dict[str, Any]] = {
    "FP8 dynamic of llm-compressor": compressed_tensors(FP8, FP8_TOKEN, "float-quantized"),
    "FP8 static of llm-compressor": compressed_tensors(FP8_TENSOR, FP8_TENSOR, "float-quantized"),
    "FP8 blocks of llm-compressor": compressed_tensors(
        FP8 | {"strategy": "block", "block_structure": [128, 128]},
        FP8 | {"strategy": "group", "group_size": 128, "dynamic": True},
        "float-quantized",
    ),
    "W8A8 integers of llm-compressor": compressed_tensors(INT8, INT8_TOKEN, "int-quantized"),
    "W8A8 integers of llm-compressor, asymmetric": compressed_tensors(
        INT8, INT8_TOKEN | {"symmetric": False}, "int-quantized"
    ),
    "W8A8 integers of llm-compressor, static": compressed_tensors(INT8, INT8 | {"strategy": "tensor"}, "int-quantized"),
    "W8A8 integers by the naive name": compressed_tensors(INT8, INT8_TOKEN, "naive-quantized"),
    "FP8 by the naive name": compressed_tensors(FP8, FP8_TOKEN, "naive-quantized"),
    "W4A16 of llm-compressor": compressed_tensors(INT4, None, "pack-quantized"),
    "W4A16 of llm-compressor, asymmetric": compressed_tensors(INT4 | {"symmetric": False}, None, "pack-quantized"),
    "W4A16 of llm-compressor, channels": compressed_tensors(
        INT4 | {"strategy": "channel", "group_size": None}, None, "pack-quantized"
    ),
    "W4A16 of llm-compressor, actorder weight": compressed_tensors(
        INT4 | {"actorder": "weight"}, None, "pack-quantized"
    ),
    "W4A16 of llm-compressor, actorder group": compressed_tensors(INT4 | {"actorder": "group"}, None, "pack-quantized"),
    "NVFP4 of llm-compressor": compressed_tensors(FP4, FP4 | {"dynamic": "local"}, "nvfp4-pack-quantized"),
    "NVFP4A16 of llm-compressor": compressed_tensors(FP4, None, "nvfp4-pack-quantized"),
    "MXFP4 of llm-compressor": compressed_tensors(MXFP4, MXFP4 | {"dynamic": True}, "mxfp4-pack-quantized"),
    "MXFP4A16 of llm-compressor": compressed_tensors(MXFP4, None, "mxfp4-pack-quantized"),
    "mixed formats of llm-compressor": mixed(
        **{
            "re:.*self_attn.*": (FP8, FP8_TOKEN, "float-quantized"),
            "re:.*mlp.*": (INT4, None, "pack-quantized"),
        }
    ),
    "FP8 with a KV cache of llm-compressor": compressed_tensors(
        FP8, FP8_TOKEN, "float-quantized", kv_cache_scheme=FP8_TENSOR
    ),
    "FP8 of ModelOpt": modelopt("FP8"),
    "NVFP4 of ModelOpt": modelopt("NVFP4", config_groups={"group_0": {"weights": {"num_bits": 4, "group_size": 16}}}),
    "NVFP4 weights of ModelOpt": modelopt("W4A16_NVFP4", group_size=16),
    "FP8 of ModelOpt, channels": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "FP8 of ModelOpt, blocks": modelopt("fp8_pb_wo"),
    "FP8 of ModelOpt, with a KV cache": modelopt("FP8", kv_cache_scheme=MODELOPT_CACHE),
    "FP8 of ModelOpt, by its own file": modelopt_file("FP8", kv_cache_quant_algo="FP8"),
    "mixed precision of ModelOpt": modelopt(
        "MIXED_PRECISION", quantized_layers={"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
    ),
    "W8A16 of llm-compressor": compressed_tensors(INT4 | {"num_bits": 8}, None, "pack-quantized"),
    "auto-round": auto_round(block_name_to_quantize="model.layers"),
    "auto-round for AWQ": auto_round(packing_format="auto_round:auto_awq"),
    "auto-round, bits by module": auto_round(extra_config={"model.layers.0.mlp.up_proj": {"bits": 8}}),
    "auto-round, asymmetric": auto_round(sym=False),
    "auto-round, some modules in 16 bits": auto_round(extra_config={"lm_head": {"bits": 16, "data_type": "float"}}),
    "fp8 blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8 static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fp8 without excluded modules": {"quant_method": "fp8", "modules_to_not_convert": None},
    "awq": awq(modules_to_not_convert=None),
    "awq with excluded modules": awq(modules_to_not_convert=["visual"]),
    "gptq": gptq(),
    "gptq, asymmetric": gptq(sym=False),
    "gptq, inputs out of order": gptq(desc_act=True, static_groups=False, true_sequential=True),
    "gptq, one group": gptq(group_size=-1),
    "gptq in 8 bits": gptq(bits=8),
    "gptq, bits by module": gptq(dynamic={"-:.*mlp.gate": {}, r".*\.down_proj": {"bits": 8}}),
    "gptq version 2": gptq(checkpoint_format="gptq_v2"),
    "mxfp4 of gpt-oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "W4A8 integers of llm-compressor": (
        compressed_tensors(INT4, INT8_TOKEN, "int-quantized"),
        "num_bits in weights 4 is not supported; supported: 8",
    ),
    "W8A8 integers, asymmetric weights": (
        compressed_tensors(INT8 | {"symmetric": False}, INT8_TOKEN, "int-quantized"),
        "symmetric in weights False is not supported",
    ),
    "integer weights alone": (
        compressed_tensors(INT8, None, "naive-quantized"),
        "input_activations null is not supported; supported: 8-bit integers",
    ),
    "W4A8 of llm-compressor": (
        compressed_tensors(INT4, FP8_TOKEN, "pack-quantized"),
        "input_activations .* is not supported; supported: None",
    ),
    "auto-round in 2 bits": (auto_round(bits=2), "bits 2 is not supported"),
    "auto-round in 2 bits of some modules": (
        auto_round(extra_config={"model.layers.0.mlp.up_proj": {"bits": 2}}),
        r"extra_config of model.layers.0.mlp.up_proj: quantization with bits 2 is not supported; supported: 4, 8",
    ),
    "auto-round for AWQ in 8 bits": (
        auto_round(packing_format="auto_round:auto_awq", bits=8),
        "bits 8 is not supported; supported: 4",
    ),
    "auto-round in mxfp4": (auto_round(data_type="mx_fp"), "data_type mx_fp is not supported; supported: int"),
    "2:4 sparse of llm-compressor": (
        compressed_tensors(FP8, FP8_TOKEN, "marlin-24"),
        "format marlin-24 is not supported",
    ),
    "NVFP4 of llm-compressor in other groups": (
        compressed_tensors(FP4 | {"group_size": 32}, FP4, "nvfp4-pack-quantized"),
        "group_size in weights 32 is not supported; supported: 16",
    ),
    "MXFP4 of llm-compressor in other groups": (
        compressed_tensors(MXFP4 | {"group_size": 64}, MXFP4, "mxfp4-pack-quantized"),
        "group_size in weights 64 is not supported; supported: 32",
    ),
    "MXFP4 of llm-compressor with inputs of 8 bits": (
        compressed_tensors(MXFP4, FP8_TOKEN, "mxfp4-pack-quantized"),
        "num_bits in input_activations 8 is not supported; supported: 4",
    ),
    "mixed formats of llm-compressor without their names": (
        compressed_tensors(FP8, FP8_TOKEN, "mixed-precision"),
        "format mixed-precision is not supported; supported: float-quantized, int-quantized, naive-quantized, ",
    ),
    "FP8 weights alone of llm-compressor": (
        compressed_tensors(FP8, None, "float-quantized"),
        "input_activations null is not supported",
    ),
    "empty groups of llm-compressor": (
        compressed_tensors(FP8, FP8_TOKEN, "float-quantized", config_groups={"group_0": {}, "group_1": {}}),
        "quantization_config in config.json cannot be read",
    ),
    "compressed-tensors without weights": (
        compressed_tensors(None, FP8_TOKEN, "float-quantized"),
        "quantization_config in config.json cannot be read",
    ),
    "compressed-tensors without groups": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": None},
        "without config_groups is not supported",
    ),
    "W4A8 of ModelOpt": (modelopt("W4A8_AWQ"), "quant_algo W4A8_AWQ is not supported; supported: FP8"),
    "NVFP4 of ModelOpt in other groups": (
        modelopt("NVFP4", group_size=32),
        "group_size 32 is not supported; supported: 16",
    ),
    "SVD of ModelOpt": (modelopt_file("NVFP4_SVD", lora_rank=32), "quant_algo NVFP4_SVD is not supported"),
    "ModelOpt without an algorithm": (modelopt_file(""), "quant_algo  is not supported"),
    "NVFP4 cache of ModelOpt": (
        modelopt_file("FP8", kv_cache_quant_algo="NVFP4"),
        "kv_cache_scheme NVFP4 is not supported; supported: none, 8-bit floats",
    ),
    "scales of the cache by head": (
        compressed_tensors(FP8, FP8_TOKEN, "float-quantized", kv_cache_scheme=FP8_TENSOR | {"strategy": "attn_head"}),
        "strategy in kv_cache_scheme attn_head is not supported; supported: tensor",
    ),
    "rotated inputs of llm-compressor": (
        compressed_tensors(INT4, None, "pack-quantized", transform_config={"config_groups": {"R1": {}}}),
        "transform_config .* is not supported; supported: None",
    ),
    "sparse weights of llm-compressor": (
        compressed_tensors(FP8, FP8_TOKEN, "float-quantized", sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config sparse-24-bitmask is not supported; supported: dense",
    ),
    "awq in gemv": (awq(version="gemv"), "version gemv is not supported; supported: gemm"),
    "awq of llm-awq": (awq(version="gemv_fast"), "version gemv_fast is not supported"),
    "gptq in 3 bits of some modules": (gptq(dynamic={"+:.*mlp": {"bits": 3}}), "bits 3 is not supported"),
    "gptq in 3 bits": (gptq(bits=3), "bits 3 is not supported"),
    "gptq with LM head": (gptq(lm_head=True), "lm_head True is not supported"),
    "gptq in marlin's layout": (gptq(checkpoint_format="marlin"), "checkpoint_format marlin is not supported"),
    "gptq with a wrong group size": (gptq(group_size=None), "group_size None is not supported; supported: -1"),
    "fp8 in e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt e5m2 is not supported"),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "fp8"),
    "bitsandbytes nf4": (BITSANDBYTES | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "take .* awq or gptq"),
    "bitsandbytes int8": (BITSANDBYTES | {"load_in_8bit": True}, "quantization bitsandbytes is not supported"),
    "bitsandbytes before its name": ({"load_in_8bit": True}, "quantization bitsandbytes is not supported"),
    "quark fp8": ({"quant_method": "quark", "export": {"pack_method": "reorder"}}, "quantization fp8"),
    "hqq": ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "awq or gptq"),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, "quantization fp8"),
    "aqlm": ({"quant_method": "aqlm", "nbits_per_codebook": 16, "num_codebooks": 1}, "awq or gptq"),
    "quip#": ({"quant_method": "quip#", "codebook": "E8P12"}, "take .* awq or gptq"),
    "vptq": ({"quant_method": "vptq", "config_for_layers": {}}, "awq or gptq"),
    "higgs": ({"quant_method": "higgs", "bits": 4, "p": 2}, "awq or gptq"),
    "spqr": ({"quant_method": "spqr", "bits": 3, "beta1": 16}, "awq or gptq"),
    "fp-quant": ({"quant_method": "fp_quant", "forward_dtype": "mxfp4"}, "awq or gptq"),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, "quantization fp8"),
    "bitnet": ({"quant_method": "bitnet", "linear_class": "bitlinear"}, "none of 1 or 2 bits is supported"),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "quantization fp8"),
    "exl2": ({"quant_method": "exl2", "bits": 4.0}, "awq or gptq"),
    "exl3": ({"quant_method": "exl3", "bits": 3.5}, "awq or gptq"),
    "marlin": ({"quant_method": "marlin", "group_size": 128}, "awq or gptq"),
    "mlx": ({"bits": 4, "group_size": 64, "mode": "affine"}, "quantization mlx is not supported"),
    "sinq": ({"quant_method": "sinq", "nbits": 4}, "awq or gptq"),
    "a method of tomorrow": ({"quant_method": "tomorrow"}, "take the model in one of these"),
    "no method": ({"activation_scheme": "dynamic"}, "quantization unnamed is not supported"),
    "a method that is no text": ({"quant_method": ["awq"]}, r"quantization \['awq'\] is not supported"),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_configuration_is_supported(name: str) -> None:
    assert read_quantization(SUPPORTED[name], None) != Quantization(None)
    linear_method(read_quantization(SUPPORTED[name], None), SUPPORTED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_is_refused_by_a_sentence(name: str) -> None:
    stored, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as error:
        read_quantization(stored, None)
    assert "\n" not in str(error.value)


def test_names_of_modules_come_before_patterns_and_these_before_all() -> None:
    stored = mixed(
        Linear=(FP8, FP8_TOKEN, "float-quantized"),
        **{
            "re:.*mlp.*": (INT4, None, "pack-quantized"),
            "model.layers.0.mlp.up_proj": (FP8_TENSOR, FP8_TENSOR, "float-quantized"),
        },
    )
    quantization = read_quantization(stored, None)
    assert quantization.format_of("model.layers.0.mlp.up_proj") == Fp8Format("tensor", static=True)
    assert quantization.format_of("model.layers.1.mlp.up_proj") == PackQuantizedFormat(4, 128, True, False)
    assert quantization.format_of("model.layers.1.self_attn.q_proj") == Fp8Format("channel", static=False)
    assert quantization.format_of("lm_head") is None


@pytest.mark.parametrize(
    ("excluded", "module"), [("*layers.0.*", "model.layers.0.mlp.up_proj"), ("lm_head", "lm_head")]
)
def test_modelopt_excludes_modules_by_name_and_pattern(excluded: str, module: str) -> None:
    quantization = read_quantization(modelopt("FP8", ignore=[excluded]), None)
    assert quantization.format_of(module) is None
    assert quantization.format_of("model.layers.1.mlp.up_proj") == Fp8Format("tensor", static=True)


@pytest.mark.parametrize(
    ("stored", "holds_floats_of_8_bits"),
    [
        (modelopt("FP8"), False),
        (modelopt("FP8", kv_cache_scheme=MODELOPT_CACHE), True),
        (modelopt_file("FP8", kv_cache_quant_algo="FP8"), True),
        (compressed_tensors(FP8, FP8_TOKEN, "float-quantized"), False),
        (compressed_tensors(FP8, FP8_TOKEN, "float-quantized", kv_cache_scheme=FP8_TENSOR), True),
    ],
)
def test_the_checkpoint_says_what_the_kv_cache_holds(stored: dict[str, Any], holds_floats_of_8_bits: bool) -> None:
    assert read_quantization(stored, None).fp8_kv_cache == holds_floats_of_8_bits


@pytest.mark.parametrize(
    ("stored", "wanted", "multiplies_8_bits"),
    [
        (None, None, False),
        (None, "fp8", True),
        (compressed_tensors(FP8, FP8_TOKEN, "float-quantized"), None, True),
        (compressed_tensors(INT8, INT8_TOKEN, "int-quantized"), None, True),
        (modelopt("FP8"), None, True),
        (modelopt("NVFP4"), None, False),
        (gptq(), None, False),
        (gptq(bits=8), None, False),
    ],
)
def test_products_are_of_8_bits_where_inputs_are_quantized_too(
    stored: dict[str, Any] | None, wanted: str | None, multiplies_8_bits: bool
) -> None:
    assert read_quantization(stored, wanted).multiplies_8_bits == multiplies_8_bits


def test_a_pattern_that_is_no_pattern_is_refused() -> None:
    stored = compressed_tensors(FP8, FP8_TOKEN, "float-quantized", ignore=["re:("])
    with pytest.raises(ValueError, match=r"a pattern that cannot be read: '\('"):
        read_quantization(stored, None).format_of("lm_head")


def test_the_first_pattern_of_gptq_holds_and_changes_only_its_fields() -> None:
    dynamic = {
        r"-:.*\.mlp\.gate$": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 32},
        r".*\.mlp\.": {"desc_act": True},
    }
    quantization = read_quantization(gptq(dynamic=dynamic), None)
    assert quantization.format_of("model.layers.0.mlp.gate") is None
    assert quantization.format_of("model.layers.0.mlp.down_proj") == GptqFormat(8, 32, False, True, 1)
    assert quantization.format_of("model.layers.0.mlp.up_proj") == GptqFormat(4, 128, True, True, 1)
    assert quantization.format_of("model.layers.0.self_attn.q_proj") == GptqFormat(4, 128, False, True, 1)


def test_names_of_auto_round_come_before_patterns_that_are_searched_for() -> None:
    modules = {
        r"layers\.1\.mlp\.(gate|up)": {"bits": 8},
        "model.layers.1.mlp.up_proj": {"bits": 16, "data_type": "float"},
    }
    quantization = read_quantization(auto_round(extra_config=modules), None)
    assert quantization.format_of("model.layers.1.mlp.up_proj") is None
    assert quantization.format_of("model.layers.1.mlp.gate_proj") == GptqFormat(8, 128, False, True, 1)
    assert quantization.format_of("model.layers.1.mlp.down_proj") == GptqFormat(4, 128, False, True, 1)


@pytest.mark.parametrize("stored", [None, SUPPORTED["awq"]], ids=["unquantized", "quantized"])
def test_an_unknown_method_that_the_user_wants_is_answered_with_all(stored: dict[str, Any] | None) -> None:
    with pytest.raises(ValueError, match=r"quantization awk is not supported; supported: fp8, fp8_per_block, .*awq"):
        read_quantization(stored, "awk")


def test_unquantized_checkpoints_are_quantized_by_the_names_of_vllm() -> None:
    for name, by_block in (("fp8", False), ("fp8_per_block", True)):
        assert read_quantization(None, name).format == OnlineFp8Format(by_block)
        with pytest.raises(ValueError, match=f"quantization {name} does not fit the checkpoint"):
            read_quantization(SUPPORTED["awq"], name)
