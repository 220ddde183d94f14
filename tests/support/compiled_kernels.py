"""Run as a program: compiles for sm_90 every kernel variant that steps of real models launch, in two processes.

Prints one line a variant. Ends with an error where one does not compile, does not fit a multiprocessor, or is launched
by a step of one shape and not by another: such a variant would be compiled while requests wait.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from proa_engine.kernels.variants import Variant, record
from support.shape_models import REAL_MODELS, run_shapes, shape_model

MOST_SHARED_MEMORY = 227 * 1024  # bytes a program, on Hopper
# Decodes, tokens, requests.
STEPS = ((3, 50, 7), (1, 1, 1), (16, 16, 16), (0, 7, 1), (0, 64, 2), (33, 70, 40))
CASES = [(name, torch.bfloat16) for name in REAL_MODELS] + [
    ("Qwen3-0.6B", torch.float16),
    ("Qwen3-0.6B", torch.float32),
]


def variants_of(model_name: str, dtype: torch.dtype) -> set[Variant]:
    model = shape_model(REAL_MODELS[model_name], dtype)
    of_each_step = [
        set(record(partial(run_shapes, model, dtype, num_decodes=d, num_tokens=t, num_requests=r))) for d, t, r in STEPS
    ]
    new = {variant.name for variant in set.union(*of_each_step[1:]) - of_each_step[0]}
    assert not new, f"{model_name}, {dtype}: compiled anew for other shapes: {new}"
    return of_each_step[0]


def compile_variant(variant: Variant) -> str:
    compiled = variant.compile()
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= MOST_SHARED_MEMORY, f"{variant.name}: {compiled.metadata.shared} bytes"
    return variant.name


def main() -> None:
    variants = set.union(*(variants_of(*case) for case in CASES))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for name in pool.map(compile_variant, sorted(variants, key=lambda variant: variant.specialization)):
            print(name, "ok", flush=True)


if __name__ == "__main__":
    main()
