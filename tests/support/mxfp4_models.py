"""Writes gpt-oss checkpoints with experts in 4-bit floats, as they lie on disk in the world, each with its dense twin.

The twin holds what transformers dequantizes the experts to.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
Tensors = dict[str, torch.Tensor]


def mxfp4_tensors(name: str, shape: tuple[int, int, int], seed: int = 2) -> tuple[Tensors, Tensors]:
    """Random weights [experts, outputs, inputs] of the tensor `name`: what is stored, and transformers' dense twin."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, outputs, inputs = shape
    generator = torch.Generator().manual_seed(seed)
    groups = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 124, groups, dtype=torch.uint8, generator=generator)
    dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, {name: dense}


def write_mxfp4(source: Path, folder: Path) -> tuple[Path, Path]:
    """Replace the experts of `source`, a gpt-oss folder; returns the quantized folder and that of its dense twin."""
    quantized, twin = folder / "quantized", folder / "dense"
    tensors = load_file(source / "model.safetensors")
    stored, dense = dict(tensors), dict(tensors)
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            packed, unpacked = mxfp4_tensors(name, (experts, outputs, inputs), seed=number)
            del stored[name]
            stored |= packed
            dense |= unpacked
    config = json.loads((source / "config.json").read_text())
    for target, content, fields in (
        (quantized, stored, config | {"quantization_config": MXFP4}),
        (twin, dense, config),
    ):
        shutil.copytree(source, target)
        save_file(content, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(fields))
    return quantized, twin
