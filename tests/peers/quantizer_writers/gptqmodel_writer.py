"""Checkpoints by GPTQModel, judged by the weights that its own torch kernel multiplies with."""

# ruff: noqa: E402
import os

os.cpu_count = lambda: (
    4
)  # before GPTQModel is imported: a machine of two cores is given one worker, and some of its pools ask for two

from functools import partial
from pathlib import Path
from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT

from quantizer_writers.common import Texts, Theirs, Write, dense_twin, main, measure_model


def write(options: dict[str, Any], base: Path, folder: Path, texts: Texts) -> Theirs:
    options = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False} | options
    model = GPTQModel.load(str(base), QuantizeConfig(device="cpu", offload_to_disk=False, **options))
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts.calibration]
    model.quantize(rows, batch_size=1)
    model.save(str(folder))
    loaded = GPTQModel.load(str(folder), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
    dense = {}
    for name, module in loaded.model.named_modules():
        if hasattr(module, "qweight"):
            module.scales = module.scales.float()
            dense[f"{name}.weight"] = module.dequantize_weight().T
    logits = measure_model(dense_twin(folder, dense), texts)
    return Theirs(logits, logits)


SCHEMES: dict[str, Write] = {
    "4bit": partial(write, {}),
    "4bit-asym": partial(write, {"sym": False}),
    "4bit-desc-act": partial(write, {"desc_act": True}),
    "4bit-channel": partial(write, {"group_size": -1, "act_group_aware": False}),
    "4bit-v2": partial(write, {"format": FORMAT.GPTQ_V2}),
    "4bit-asym-v2": partial(write, {"format": FORMAT.GPTQ_V2, "sym": False}),
    "8bit": partial(write, {"bits": 8}),
    "8bit-asym": partial(write, {"bits": 8, "sym": False}),
    "8bit-desc-act": partial(write, {"bits": 8, "desc_act": True}),
    "3bit": partial(write, {"bits": 3}),
    "dynamic": partial(
        write, {"dynamic": {r"+:.*down_proj.*": {"bits": 8, "group_size": 64}, r"-:.*\.0\.self_attn\.o_proj.*": {}}}
    ),
}

if __name__ == "__main__":
    main("gptqmodel", SCHEMES)
