"""Checkpoints by NVIDIA's ModelOpt, judged by its own forward with simulated quantization."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantizer_writers.common import Texts, Theirs, Write, dense_twin, main, measure_model


def write(config: dict[str, Any], base: Path, folder: Path, texts: Texts) -> Theirs:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, attn_implementation="eager").eval()

    @torch.no_grad()
    def calibrate(model: torch.nn.Module) -> None:
        for ids in texts.calibration:
            model(torch.tensor([ids]))

    model = mtq.quantize(model, deepcopy(config), calibrate)
    with torch.no_grad():
        requantize_resmooth_fused_llm_layers(model)  # as the export does: matrices of one input share their scales
        simulated = deepcopy(model).float()
        export_hf_checkpoint(model, export_dir=folder)
    twin = dense_twin(folder, dense_weights(load_file(folder / "model.safetensors")))
    weights = measure_model(twin, texts)
    for name, parameter in twin.named_parameters():
        simulated.get_parameter(name).data = parameter.data
    mtq.disable_quantizer(simulated, "*weight_quantizer")
    try:
        return Theirs(weights, measure_model(simulated, texts))
    except (AssertionError, RuntimeError):  # activations in blocks are simulated on a GPU alone
        return Theirs(weights, weights)


def dense_weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the library makes of each stored matrix that has scales."""
    names = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
    return {name: dequantize(tensors[name], tensors[f"{name}_scale"], tensors.get(f"{name}_scale_2")) for name in names}


def dequantize(stored: torch.Tensor, scale: torch.Tensor, of_tensor: torch.Tensor | None) -> torch.Tensor:
    rows, columns = stored.shape
    if of_tensor is not None:
        shape = torch.Size((rows, 2 * columns))
        blocks = {-1: shape[1] // scale.shape[1]}
        return NVFP4QTensor(shape, torch.float32, stored).dequantize(
            scale=scale, double_scale=of_tensor, block_sizes=blocks
        )
    if scale.dtype == torch.uint8 and stored.dtype == torch.uint8:
        shape = torch.Size((rows, 2 * columns))
        return MXFP4QTensor(shape, torch.float32, stored).dequantize(scale=scale, block_sizes={-1: 32})
    if scale.dtype == torch.uint8:
        return MXFP8QTensor(stored.shape, torch.float32, stored).dequantize(scale=scale, block_sizes={-1: 32})
    if scale.dim() == 4:
        scale = scale[:, 0, :, 0].repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return FP8QTensor(stored.shape, torch.float32, stored).dequantize(scale=scale)
    return FP8QTensor(stored.shape, torch.float32, stored).dequantize(scale=scale[:, None] if scale.dim() else scale)


def with_kv_cache(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "quant_cfg": [*config["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]}


SCHEMES: dict[str, Write] = {
    "fp8": partial(write, mtq.FP8_DEFAULT_CFG),
    "fp8-kv-fp8": partial(write, with_kv_cache(mtq.FP8_DEFAULT_CFG)),
    "fp8-by-channel": partial(write, mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG),
    "fp8-blocks": partial(write, mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG),
    "nvfp4": partial(write, mtq.NVFP4_DEFAULT_CFG),
    "nvfp4-kv-fp8": partial(write, with_kv_cache(mtq.NVFP4_DEFAULT_CFG)),
    "nvfp4-mlp-only": partial(write, mtq.NVFP4_MLP_ONLY_CFG),
    "w4a16-nvfp4": partial(write, mtq.W4A16_NVFP4_CFG),
    "w4a8-nvfp4": partial(write, mtq.W4A8_NVFP4_FP8_CFG),
    "mxfp4": partial(write, mtq.MXFP4_DEFAULT_CFG),
    "mxfp8": partial(write, mtq.MXFP8_DEFAULT_CFG),
}

if __name__ == "__main__":
    main("modelopt", SCHEMES)
