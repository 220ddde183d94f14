"""Checkpoints by llm-compressor, judged by compressed-tensors' own decompression."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import compressed_tensors.compressors.mxfp4.base as mxfp4_compressor
import compressed_tensors.compressors.nvfp4.base as nvfp4_compressor
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.quantization.quant_config import QuantizationStatus
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.utils.match import is_match, match_targets
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantizer_writers.common import Texts, Theirs, Write, dense_twin, main, measure_model

# Decompress in float32, as all else is computed here; the library's default is bfloat16.
for module in (nvfp4_compressor, mxfp4_compressor):
    if hasattr(module, "unpack_fp4_from_uint8"):
        module.unpack_fp4_from_uint8 = partial(module.unpack_fp4_from_uint8, dtype=torch.float32)

IGNORE = ["lm_head", "re:.*mlp.gate$"]
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
BY_CHANNEL = {"strategy": "channel", "dynamic": False}
BY_TOKEN = {"strategy": "token", "dynamic": True}
BY_TENSOR = {"strategy": "tensor", "dynamic": False}
KV_FP8 = FP8 | BY_TENSOR


def integers(bits: int, group_size: int | None, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    by = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric} | by | more


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, *targets: str) -> dict[str, Any]:
    return {"targets": list(targets or ("Linear",)), "weights": weights, "input_activations": inputs}


def preset(name: str, *targets: str) -> dict[str, Any]:
    scheme: dict[str, Any] = preset_name_to_scheme(name, list(targets or ("Linear",))).model_dump()
    return scheme


def write(
    modifier: type,
    groups: list[dict[str, Any]],
    kv_cache: dict[str, Any] | None,
    base: Path,
    folder: Path,
    texts: Texts,
) -> Theirs:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    named = {f"group_{number}": one for number, one in enumerate(groups)}
    recipe = modifier(
        ignore=IGNORE if "moe" in model.config.model_type else IGNORE[:1], config_groups=named, kv_cache_scheme=kv_cache
    )
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts.calibration]
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=[recipe],
        num_calibration_samples=len(rows),
        max_seq_length=512,
    )
    model.save_pretrained(folder, save_compressed=True)
    return judge(folder, texts)


def judge(folder: Path, texts: Texts) -> Theirs:
    """The logits of a checkpoint in compressed-tensors: its matrices decompressed by the library, in float32."""
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate({k: v for k, v in stored.items() if k != "quant_method"})
    modules: dict[str, tuple[QuantizationScheme, dict[str, torch.Tensor]]] = {}
    tensors = load_file(folder / "model.safetensors")
    for name in {name.rpartition(".")[0] for name in tensors}:
        scheme = scheme_of(name, config)
        of_module = {key.rpartition(".")[2]: tensors[key] for key in tensors if key.rpartition(".")[0] == name}
        if scheme is not None and {"weight_scale", "weight_packed"} & set(of_module):
            modules[name] = scheme, decompress(of_module, scheme)
    dense = {f"{name}.weight": state["weight"] for name, (_, state) in modules.items()}
    model = dense_twin(folder, dense)
    linearize_moe(model)
    weights = measure_model(model, texts)
    for name, (scheme, state) in modules.items():
        if scheme.input_activations is not None:
            quantize_inputs(model.get_submodule(name), scheme, state)
    return Theirs(weights, measure_model(model, texts))


def scheme_of(name: str, config: QuantizationConfig) -> QuantizationScheme | None:
    linear = torch.nn.Linear(1, 1)
    if is_match(name, linear, config.ignore or []):
        return None
    by_target = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    matching = match_targets(name, linear, list(by_target))  # the most specific first
    return by_target[matching[0]] if matching else None


def decompress(state: dict[str, torch.Tensor], scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    stored_as = scheme.format or infer_module_format(torch.nn.Linear, scheme)
    keep = {"weight_packed", "weight", "weight_shape"}
    in_float32 = {
        k: t.float() if t.dtype in (torch.bfloat16, torch.float16) and k not in keep else t for k, t in state.items()
    }
    compressor = BaseCompressor.get_value_from_registry(getattr(stored_as, "value", stored_as))
    result: dict[str, torch.Tensor] = compressor.decompress(in_float32, scheme)
    return result


def quantize_inputs(module: torch.nn.Module, scheme: QuantizationScheme, state: dict[str, torch.Tensor]) -> None:
    """Round what the module is given as the library's own forward does."""
    module.quantization_scheme, module.quantization_status = scheme, QuantizationStatus.FROZEN
    for name in ("input_scale", "input_zero_point", "input_global_scale"):
        if name in state:
            module.register_buffer(name, state[name].float() if state[name].is_floating_point() else state[name])
    if "input_zero_point" not in state:
        module.input_zero_point = None
    args = scheme.input_activations

    def hook(owner: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = inputs
        rows = (
            x[None] if x.dim() == 2 else x
        )  # of experts: the library takes a scale per token of three dimensions alone
        return (forward_quantize(owner, rows, "input", args).view_as(x),)

    module.register_forward_pre_hook(hook)


def scheme(
    *groups: dict[str, Any], kv_cache: dict[str, Any] | None = None, modifier: type = QuantizationModifier
) -> Write:
    return partial(write, modifier, list(groups), kv_cache)


ATTENTION, FEED_FORWARD = "re:.*self_attn.*_proj$", "re:.*mlp.*_proj$"
FP8_DYNAMIC = group(FP8 | BY_CHANNEL, FP8 | BY_TOKEN)
SCHEMES: dict[str, Write] = {
    "w4a16-sym": scheme(group(integers(4, 32))),
    "w4a16-asym": scheme(group(integers(4, 32, symmetric=False))),
    "w4a16-g128": scheme(group(integers(4, 128))),
    "w4a16-channel": scheme(group(integers(4, None))),
    "w4a16-gptq": scheme(group(integers(4, 32, symmetric=False)), modifier=GPTQModifier),
    "w4a16-actorder": scheme(group(integers(4, 32, actorder="static")), modifier=GPTQModifier),
    "w8a16": scheme(group(integers(8, 32))),
    "w8a16-asym": scheme(group(integers(8, 32, symmetric=False))),
    "w8a16-channel": scheme(group(integers(8, None))),
    "w8a8": scheme(preset("W8A8")),
    "w8a8-gptq": scheme(preset("W8A8"), modifier=GPTQModifier),
    "w8a8-static": scheme(group(INT8 | BY_CHANNEL, INT8 | BY_TENSOR)),
    "w8a8-static-asym": scheme(group(INT8 | BY_CHANNEL, INT8 | BY_TENSOR | {"symmetric": False})),
    "w8a8-asym": scheme(group(INT8 | BY_CHANNEL, INT8 | BY_TOKEN | {"symmetric": False})),
    "w8a8-tensor": scheme(group(INT8 | BY_TENSOR, INT8 | BY_TOKEN)),
    "w4a8": scheme(group(integers(4, 32), INT8 | BY_TOKEN)),
    "fp8": scheme(preset("FP8")),
    "fp8-dynamic": scheme(FP8_DYNAMIC),
    "fp8-block": scheme(preset("FP8_BLOCK")),
    "fp8-w8a16": scheme(group(FP8 | BY_CHANNEL)),
    "fp8-kv-fp8": scheme(FP8_DYNAMIC, kv_cache=KV_FP8),
    "w4a16-kv-fp8": scheme(group(integers(4, 32)), kv_cache=KV_FP8),
    "nvfp4": scheme(preset("NVFP4")),
    "nvfp4a16": scheme(preset("NVFP4A16")),
    "mxfp4": scheme(preset("MXFP4")),
    "mxfp4a16": scheme(preset("MXFP4A16")),
    "mxfp8": scheme(preset("MXFP8")),
    "mixed-fp8-w4a16": scheme(
        group(FP8 | BY_CHANNEL, FP8 | BY_TOKEN, ATTENTION), group(integers(4, 32), None, FEED_FORWARD)
    ),
    "mixed-fp8-nvfp4": scheme(group(FP8 | BY_CHANNEL, FP8 | BY_TOKEN, ATTENTION), preset("NVFP4", FEED_FORWARD)),
    "mixed-w8-w4": scheme(group(integers(8, 32), None, "re:.*down_proj$"), group(integers(4, 32))),
}

if __name__ == "__main__":
    main("llmcompressor", SCHEMES)
