"""Run as a program: compiles for sm_90, in two processes, every kernel variant that engines of real models launch.

Prints one line a variant. Ends with an error where one does not compile or does not fit a multiprocessor, or where
steps of other shapes launch variants that the start of the engine does not: they would be compiled while requests wait.
"""

import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from proa_engine.config import EngineConfig
from proa_engine.kernels.variants import Variant, record
from proa_engine.worker.shape_worker import ShapeWorker
from proa_engine.worker.warmup import GREEDY, LIMITED, PENALIZED, decode_plan, finish_plan, prefill_plan
from support.shape_models import REAL_MODELS, make_shape_model

DType = Literal["bfloat16", "float16", "float32"]
MOST_SHARED_MEMORY = 227 * 1024  # bytes a program, on Hopper
CASES: list[tuple[str, DType]] = [(name, "bfloat16") for name in REAL_MODELS]
CASES += [("Qwen3-0.6B", "float16"), ("Qwen3-0.6B", "float32")]


def variants_of(model_name: str, dtype: DType) -> set[Variant]:
    """Those of an engine's start."""
    with tempfile.TemporaryDirectory() as folder:
        worker = ShapeWorker(EngineConfig(model=str(make_shape_model(Path(folder), model_name)), dtype=dtype))
        at_start = set(record(worker.rehearse))
    later = {variant.name for variant in set(record(lambda: run_odd_steps(worker))) - at_start}
    assert not later, f"{model_name}, {dtype}: compiled while requests wait: {later}"
    return at_start


def run_odd_steps(worker: ShapeWorker) -> None:
    for lengths in ([1], [7], [64], [129, 1, 33, 300], [5] * 17):
        for params in (GREEDY, LIMITED, PENALIZED):
            plan = prefill_plan(sorted(lengths), block_size=16, num_blocks=999, params=params)
            names = list(plan.num_scheduled_tokens)
            for step in (plan, decode_plan(names, 1), decode_plan(names[:3], 2)):
                inputs = worker.prepare(step)
                assert inputs is not None
                worker.forward(inputs)
                worker.sample()
            worker.prepare(finish_plan(names))


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
