"""Checkpoints by AutoRound, judged by what its own matrices make of the unit vectors."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoRoundConfig, AutoTokenizer

from quantizer_writers.common import Texts, Theirs, Write, main, measure_model

LENGTH = 128  # of a row to calibrate with


def write(stored_as: str, options: dict[str, Any], base: Path, folder: Path, texts: Texts) -> Theirs:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    rows = [torch.tensor([(ids * LENGTH)[:LENGTH]]) for ids in texts.calibration]
    fixed = {"iters": 4, "nsamples": len(rows), "seqlen": LENGTH, "device_map": "cpu", "enable_torch_compile": False}
    quantizer = AutoRound(
        model,
        AutoTokenizer.from_pretrained(base),
        dataset=rows,
        **{"scheme": "W4A16", "group_size": 32, **fixed, **options},
    )
    quantizer.quantize_and_save(str(folder), format=stored_as)
    for nested in [file.parent for file in folder.glob("*/config.json")]:  # named after its options
        for file in nested.iterdir():
            shutil.move(file, folder)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", quantization_config=AutoRoundConfig(backend="torch")
    )
    dense = {f"{n}.weight": unit_products(m) for n, m in loaded.named_modules() if hasattr(m, "qweight")}
    stored = load_file(folder / "model.safetensors")
    assert sum(name.endswith(".qweight") for name in stored) == len(dense), (
        "the library's own reader leaves matrices at random"
    )
    # Not by `dense_twin`: once AutoRound has taken a mixture apart, this process reads no other experts than its own.
    for name, matrix in dense.items():
        module = name.removesuffix(".weight")
        linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=f"{module}.bias" in stored)
        linear.weight = torch.nn.Parameter(matrix, requires_grad=False)
        loaded.set_submodule(module, linear)
    torch.nn.Module.float(loaded).load_state_dict(stored, strict=False)  # the reader has them in float16
    logits = measure_model(loaded.eval(), texts)
    return Theirs(logits, logits)


@torch.inference_mode()
def unit_products(module: torch.nn.Module) -> torch.Tensor:
    """The matrix [outputs, inputs] that a module multiplies with."""
    products: torch.Tensor = module(torch.eye(module.infeatures))
    return products.T - (0 if module.bias is None else module.bias[:, None])


SCHEMES: dict[str, Write] = {
    "auto_gptq": partial(write, "auto_gptq", {}),
    "auto_round": partial(write, "auto_round", {}),
    "auto_round-8bit": partial(write, "auto_round", {"scheme": "W8A16"}),
    "auto_round-mixed": partial(
        write, "auto_round", {"layer_config": {"down_proj": {"bits": 8}, "o_proj": {"bits": 16}}}
    ),
}

if __name__ == "__main__":
    main("autoround", SCHEMES)
