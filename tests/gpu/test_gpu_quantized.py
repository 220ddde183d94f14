"""Models of 8 and 4 bits on a GPU give the logits of a CPU, and predict as well as those of 16 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine import LLM
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.loader import load_model
from support.kernels.case import near
from support.paged_model import PagedModel
from support.perplexity import perplexity, unseen_documents
from support.quantized_models import FP8_FORMATS, INT8_FORMATS, INT_FORMATS, SIZES, write_quantized
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

EXPERT_FORMATS = {
    "experts, fp8 blocks": FP8_FORMATS["fp8, blocks"],
    "experts, awq": INT_FORMATS["awq"],
    "experts, gptq, 8 bits": INT_FORMATS["gptq, 8 bits"],
    "experts, int8": INT8_FORMATS["int8, channels, by token"],
}
FORMATS = FP8_FORMATS | INT_FORMATS | INT8_FORMATS


@pytest.mark.parametrize("name", [*FORMATS, "fp8 while loading", "experts", *EXPERT_FORMATS])
def test_models_give_the_logits_of_the_cpu(name: str, tmp_path: Path) -> None:
    quantization, format = None, FORMATS.get(name)
    if "experts" in name:
        sizes = SIZES | {"moe_intermediate_size": 256}
        folder = make_tiny_model(tmp_path / "source", "qwen3_moe", seed=3, **sizes)
        format = EXPERT_FORMATS.get(name)
    else:
        folder = make_tiny_model(tmp_path / "source", "qwen3", seed=3, **SIZES)
        quantization = "fp8" if name == "fp8 while loading" else None
    if format is not None:
        folder, _ = write_quantized(folder, tmp_path, format)
    config = read_config.from_folder(folder, quantization)
    logits = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        model = load_model(
            folder,
            config,
            dtype=dtype,
            device=torch.device(device),
            parallel=ParallelContext(),
            report=lambda line: None,
        )
        paged = PagedModel(model, dtype=dtype, device=device)
        logits[device, dtype] = model.compute_logits(paged.prefill([token % 250 for token in range(100)], 37))
    # Tensor cores keep 14 bits of a sum of 8-bit products. On the CPU, noise of 2^-14 before each quantization moves
    # logits by 3 to 9 %, since numbers become their neighbours of 8 bits, and bfloat16 moves them by 10 to 13 %.
    in_float32, in_bfloat16 = (0.1, 0.2) if name in FP8_FORMATS or "fp8" in name else (0.03, 0.15)
    near(logits["cuda", torch.float32], logits["cpu", torch.float32], in_float32)
    near(logits["cuda", torch.bfloat16], logits["cpu", torch.float32], in_bfloat16)


@pytest.mark.timeout(600)
def test_fp8_leaves_the_perplexity_within_one_percent_of_bfloat16() -> None:
    documents = unseen_documents(conversations=200, questions=100)
    in_8_bits: dict[str, Any] = {"quantization": "fp8"}
    common: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "num_gpu_blocks_override": 2048}
    plain, *rounded = (
        perplexity(LLM("builtin", **common, **options), documents)
        for options in ({}, in_8_bits, in_8_bits | {"kv_cache_dtype": "fp8"})
    )
    print(f"perplexity {plain:.5f}, in 8 bits {rounded[0]:.5f}, the cache too {rounded[1]:.5f}")
    for value in rounded:
        assert abs(value / plain - 1) < 0.01
