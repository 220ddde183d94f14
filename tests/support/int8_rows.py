"""Checkpoints of the quantization of examples/plugin: 8-bit integers with a scale for each row."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def quantize_rows(dense: Path, folder: Path, *, except_for: str | None = None) -> Path:
    """Write the model in `dense` to `folder` with quantized layers, but for modules with `except_for` in their names.
    `dense` gets the values that the quantized weights stand for. Returns the folder."""
    shutil.copytree(dense, folder)
    tensors = load_file(dense / "model.safetensors")
    quantized = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight") and (except_for is None or except_for not in name):
            scales = weight.abs().amax(1) / 127
            values = (weight / scales[:, None]).round().to(torch.int8)
            tensors[name] = values * scales[:, None]
            quantized |= {name: values, f"{name}_scale": scales}
    for place, stored in ((dense, tensors), (folder, quantized)):
        save_file(stored, place / "model.safetensors", {"format": "pt"})
    fields = json.loads((dense / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "int8_rows", "bits": 8}
    if except_for is not None:
        fields["quantization_config"]["modules_to_not_convert"] = [except_for]
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
