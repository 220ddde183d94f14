"""Writes quantized checkpoints as they lie on disk in the world, from a small model's folder, each with its dense twin.

The twin holds the dequantized weights, unquantized. Nothing here comes from the engine: these are other hands' formats.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.fp4_packing import modelopt_nvfp4_tensors, mxfp4_tensors, nvfp4_tensors
from support.int_packing import awq_tensors, gptq_tensors, pack_quantized_tensors

Tensors = dict[str, torch.Tensor]
# weight [out, in] float32 -> what is stored instead (by the last part of the name), and what that stands for
Quantizer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]

FP8 = torch.float8_e4m3fn
INPUT_SCALE = 0.02
INPUT_ZERO = -9

# Ends of the names of matrices: of most families, of DeepSeek's, of LFM2's and of Granite 4's feed-forward layers.
MATRICES = ("_proj", "_proj_with_mqa", ".w1", ".w2", ".w3", "shared_mlp.input_linear", "shared_mlp.output_linear")

# Sizes that every format can cut in two: blocks of 128, groups of 32, packs of 8.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(FP8)
    return {"weight": values, "weight_scale": scale.view(1)}, values.float() * scale


def fp8_tensor_static(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = fp8_tensor(weight)
    return tensors | {"input_scale": torch.tensor([INPUT_SCALE])}, dense


def fp8_tensor_static_scalars(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As AutoFP8 writes it: scales without a dimension."""
    tensors, dense = fp8_tensor_static(weight)
    return {name: tensor if tensor.dim() == 2 else tensor[0] for name, tensor in tensors.items()}, dense


def fp8_channel(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).clamp(-448, 448).to(FP8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def fp8_block(scale_name: str) -> Quantizer:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = (n // 128 for n in weight.shape)
        blocks = weight.view(rows, 128, columns, 128)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        values = (blocks / scale).to(FP8)
        dense = (values.float() * scale).view(weight.shape)
        return {"weight": values.view(weight.shape), scale_name: scale.view(rows, columns)}, dense

    return quantize


def int8(scale_of: str, **inputs: float) -> Quantizer:
    """compressed-tensors' int-quantized. `inputs`: static `input_scale` and `input_zero_point`."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        most = weight.abs().max().view(1, 1) if scale_of == "tensor" else weight.abs().amax(1, keepdim=True)
        scale = (most / 127.5).bfloat16()
        values = (weight / scale.float()).clamp(-128, 127).round().to(torch.int8)
        stored = {"weight": values, "weight_scale": scale.view(1) if scale_of == "tensor" else scale}
        if inputs:
            stored["input_scale"] = torch.tensor([inputs["input_scale"]])
        if "input_zero_point" in inputs:
            stored["input_zero_point"] = torch.tensor([inputs["input_zero_point"]], dtype=torch.int8)
        return stored, values.float() * scale.float()

    return quantize


def compressed_tensors(weights: Mapping[str, Any], inputs: Mapping[str, Any], kind: str = "float") -> dict[str, Any]:
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", r"re:.*layers\.1\.mlp\..*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "dynamic": False, **weights},
                "input_activations": {**common, **inputs},
                "output_activations": None,
            }
        },
    }


def gptq(*, desc_act: bool, sym: bool, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": desc_act, "sym": sym} | more


def auto_round(**more: Any) -> dict[str, Any]:
    common = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}
    return common | {"bits": 4, "group_size": 32, "sym": True, "iters": 200} | more


def pack_quantized(**weights: Any) -> dict[str, Any]:
    common = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "dynamic": False, "actorder": None}
    group = {"targets": ["Linear"], "weights": common | weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", r"re:.*layers\.1\.mlp\..*"],
        "config_groups": {"group_0": group},
    }


def fp4(kind: str, strategy: str, group_size: int, *, inputs: bool) -> dict[str, Any]:
    """compressed-tensors' mxfp4 and nvfp4."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights if inputs else None}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-pack-quantized",
        "ignore": ["lm_head", r"re:.*layers\.1\.mlp\..*"],
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]  # quantization_config
    quantize: Quantizer
    plain: tuple[str, ...] = field(default=())  # modules that stay unquantized, beside lm_head
    others: Mapping[str, Quantizer] = field(default_factory=dict)  # by the last part of the module's name


DYNAMIC_TOKEN = {"strategy": "token", "dynamic": True}
STATIC_TENSOR = {"strategy": "tensor", "dynamic": False}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
GROUPS = {"strategy": "group", "group_size": 128, "dynamic": True}
HF_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SECOND_MLP = ("model.layers.1.mlp",)

FP8_FORMATS = {
    "compressed-tensors, channels, by token": Format(
        compressed_tensors({"strategy": "channel"}, DYNAMIC_TOKEN), fp8_channel, SECOND_MLP
    ),
    "compressed-tensors, tensors, static": Format(
        compressed_tensors({"strategy": "tensor"}, STATIC_TENSOR), fp8_tensor_static, SECOND_MLP
    ),
    "compressed-tensors, blocks": Format(compressed_tensors(BLOCKS, GROUPS), fp8_block("weight_scale"), SECOND_MLP),
    "fp8, blocks": Format(HF_BLOCK, fp8_block("weight_scale_inv")),
    "fp8, blocks, some not converted": Format(
        HF_BLOCK | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]},
        fp8_block("weight_scale_inv"),
        SECOND_MLP,
    ),
    "fp8, tensors, static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, fp8_tensor_static_scalars
    ),
}
ASYMMETRIC = {"symmetric": False}
INT8_FORMATS = {
    "int8, channels, by token": Format(
        compressed_tensors({"strategy": "channel"}, DYNAMIC_TOKEN, "int"), int8("channel"), SECOND_MLP
    ),
    "int8, tensors, by token": Format(
        compressed_tensors({"strategy": "tensor"}, DYNAMIC_TOKEN, "int"), int8("tensor"), SECOND_MLP
    ),
    "int8, static": Format(
        compressed_tensors({"strategy": "channel"}, STATIC_TENSOR, "int"),
        int8("channel", input_scale=INPUT_SCALE),
        SECOND_MLP,
    ),
    "int8, by token, asymmetric": Format(
        compressed_tensors({"strategy": "channel"}, DYNAMIC_TOKEN | ASYMMETRIC, "int"), int8("channel"), SECOND_MLP
    ),
    "int8, static, asymmetric": Format(
        compressed_tensors({"strategy": "channel"}, STATIC_TENSOR | ASYMMETRIC, "int"),
        int8("channel", input_scale=INPUT_SCALE, input_zero_point=INPUT_ZERO),
        SECOND_MLP,
    ),
}
INT_FORMATS = {
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda weight: awq_tensors(weight, 32),
    ),
    "gptq": Format(gptq(desc_act=False, sym=False), lambda weight: gptq_tensors(weight, 32, sym=False)),
    "gptq, symmetric": Format(gptq(desc_act=False, sym=True), lambda weight: gptq_tensors(weight, 32, sym=True)),
    "gptq, symmetric, zeros as of version 2": Format(
        gptq(desc_act=False, sym=True), lambda weight: gptq_tensors(weight, 32, sym=True, offset=0)
    ),
    "gptq, inputs out of order": Format(
        gptq(desc_act=True, sym=False), lambda weight: gptq_tensors(weight, 32, sym=False, shuffled=True)
    ),
    "gptq, 8 bits": Format(
        gptq(desc_act=False, sym=False, bits=8), lambda weight: gptq_tensors(weight, 32, sym=False, bits=8)
    ),
    "gptq, 8 bits, symmetric, inputs out of order": Format(
        gptq(desc_act=True, sym=True, bits=8), lambda weight: gptq_tensors(weight, 32, sym=True, shuffled=True, bits=8)
    ),
    "gptq, other modules unquantized": Format(
        gptq(desc_act=False, sym=True, dynamic={r"-:model\.layers\.1\.mlp": {}}),
        lambda weight: gptq_tensors(weight, 32, sym=True),
        SECOND_MLP,
    ),
    "gptq, down in 8 bits": Format(
        gptq(desc_act=False, sym=True, dynamic={r".*\.down_proj": {"bits": 8, "group_size": 64}}),
        lambda weight: gptq_tensors(weight, 32, sym=True),
        others={"down_proj": lambda weight: gptq_tensors(weight, 64, sym=True, bits=8)},
    ),
    "gptq version 2": Format(
        gptq(desc_act=False, sym=False, checkpoint_format="gptq_v2"),
        lambda weight: gptq_tensors(weight, 32, sym=False, offset=0),
    ),
    "gptq, one group": Format(
        gptq(desc_act=False, sym=False) | {"group_size": -1}, lambda weight: gptq_tensors(weight, -1, sym=False)
    ),
    "auto-round": Format(
        auto_round(extra_config={"model.layers.1.mlp": {"bits": 16, "data_type": "float"}}),
        lambda weight: gptq_tensors(weight, 32, sym=True),
        SECOND_MLP,
    ),
    "auto-round, 8 bits": Format(auto_round(bits=8), lambda weight: gptq_tensors(weight, 32, sym=True, bits=8)),
    "auto-round, keys in 8 bits": Format(
        auto_round(extra_config={f"model.layers.{layer}.self_attn.k_proj": {"bits": 8} for layer in range(2)}),
        lambda weight: gptq_tensors(weight, 32, sym=True),
        others={"k_proj": lambda weight: gptq_tensors(weight, 32, sym=True, bits=8)},
    ),
    "auto-round as awq": Format(
        auto_round(sym=False, packing_format="auto_round:auto_awq"), lambda weight: awq_tensors(weight, 32)
    ),
    "auto-round, asymmetric": Format(auto_round(sym=False), lambda weight: gptq_tensors(weight, 32, sym=False)),
    "compressed-tensors, groups": Format(
        pack_quantized(symmetric=True), lambda weight: pack_quantized_tensors(weight, 32, sym=True), SECOND_MLP
    ),
    "compressed-tensors, asymmetric groups": Format(
        pack_quantized(symmetric=False, actorder="static"),
        lambda weight: pack_quantized_tensors(weight, 32, sym=False),
        SECOND_MLP,
    ),
    "compressed-tensors, 8 bits": Format(
        pack_quantized(symmetric=True, num_bits=8),
        lambda weight: pack_quantized_tensors(weight, 32, sym=True, bits=8),
        SECOND_MLP,
    ),
    "compressed-tensors, 8 bits, asymmetric, one group": Format(
        pack_quantized(symmetric=False, num_bits=8, strategy="channel", group_size=None),
        lambda weight: pack_quantized_tensors(weight, -1, sym=False, bits=8),
        SECOND_MLP,
    ),
    "compressed-tensors, inputs out of order": Format(
        pack_quantized(symmetric=False, actorder="group"),
        lambda weight: pack_quantized_tensors(weight, 32, sym=False, shuffled=True),
        SECOND_MLP,
    ),
    "compressed-tensors, one group": Format(
        pack_quantized(symmetric=False, strategy="channel", group_size=None),
        lambda weight: pack_quantized_tensors(weight, -1, sym=False),
        SECOND_MLP,
    ),
}
FP4_FORMATS = {
    "nvfp4": Format(
        fp4("nvfp4", "tensor_group", 16, inputs=True), lambda weight: nvfp4_tensors(weight, 500.0), SECOND_MLP
    ),
    "nvfp4, weights alone": Format(fp4("nvfp4", "tensor_group", 16, inputs=False), nvfp4_tensors, SECOND_MLP),
    "mxfp4": Format(fp4("mxfp4", "group", 32, inputs=True), mxfp4_tensors, SECOND_MLP),
    "modelopt, nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, modelopt_nvfp4_tensors
    ),
}


def write_quantized(source: Path, folder: Path, format: Format) -> tuple[Path, Path]:
    """Quantize the matrices of `source`'s layers; returns the quantized folder and that of its dense twin."""
    quantized, dense = folder / "quantized", folder / "dense"
    stored, twin = quantized_tensors(load_file(source / "model.safetensors"), format)
    config = json.loads((source / "config.json").read_text())
    _write(source, dense, twin, config)
    _write(source, quantized, stored, config | {"quantization_config": format.config})
    return quantized, dense


def quantized_tensors(tensors: Mapping[str, torch.Tensor], format: Format) -> tuple[Tensors, Tensors]:
    """Quantize the matrices of a model's layers; returns the tensors of the checkpoint and those of its dense twin."""
    stored: Tensors = {}
    twin: Tensors = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        stored[name], twin[name] = tensor, tensor
        if last == "weight" and module.endswith(MATRICES) and not module.startswith(format.plain):
            quantize = format.others.get(module.rpartition(".")[2], format.quantize)
            parts, twin[name] = quantize(tensor.float())
            del stored[name]
            stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    return stored, twin


def _write(source: Path, folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
