"""Run as a program: as `compiled_kernels`, for models of 8 and 4 bits and of experts. Products tile few rows otherwise
than many, always within a doubling, so that steps of all powers of two launch every variant."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from proa_engine.kernels.variants import Variant, record
from proa_engine.models.config import ModelConfig
from support.compiled_kernels import compile_variant
from support.shape_models import run_shapes, shape_model

# Decodes, tokens, requests.
WARM_UP = ((3, 50, 7), *((0, 2**n, 1) for n in range(14)))
STEPS = ((1, 1, 1), (16, 16, 16), (0, 7, 1), (33, 70, 40), (0, 777, 3), (200, 7001, 230))

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}
QWEN3_30B_A3B = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


def stored(model: dict[str, Any], quantization_config: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dicts(model | {"quantization_config": quantization_config}, {})


MODELS = {
    "8 bits made": ModelConfig.from_dicts(LLAMA, {}, "fp8"),
    "8 bits, static": stored(LLAMA, STATIC),
    "8 bits, blocks": stored(LLAMA, BLOCKS),
    "4 bits": stored(LLAMA, GPTQ),
    "4 bits, out of order": stored(LLAMA, GPTQ | {"desc_act": True}),
    "experts": ModelConfig.from_dicts(QWEN3_30B_A3B, {}),
    "experts, 8 bits made": ModelConfig.from_dicts(QWEN3_30B_A3B, {}, "fp8"),
    "experts, 8 bits, blocks": stored(QWEN3_30B_A3B, BLOCKS),
}


CACHE_TYPES = {"8 bits made": torch.float8_e4m3fn}  # others: bfloat16


def variants_of(name: str) -> set[Variant]:
    model = shape_model(MODELS[name], torch.bfloat16)
    cache_type = CACHE_TYPES.get(name, torch.bfloat16)
    of_each_step = [
        set(record(partial(run_shapes, model, cache_type, num_decodes=d, num_tokens=t, num_requests=r)))
        for d, t, r in WARM_UP + STEPS
    ]
    warmed_up = set.union(*of_each_step[: len(WARM_UP)])
    new = {variant.name for variant in set.union(*of_each_step) - warmed_up}
    assert not new, f"{name}: compiled anew for other shapes: {new}"
    words = (".fp8", ".int4", ".moe", *(("attention", "cache") if name in CACHE_TYPES else ()))
    # All others are those of models without quantization.
    return {variant for variant in warmed_up if any(word in variant.name for word in words)}


def main() -> None:
    variants = set.union(*map(variants_of, MODELS))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for name in pool.map(compile_variant, sorted(variants, key=lambda variant: variant.specialization)):
            print(name, "ok", flush=True)


if __name__ == "__main__":
    main()
