"""Run as a program, with the name of a group of models, on a machine with or without a GPU: compiles for Hopper every
kernel variant that engines with them launch from their start on, and checks that steps of any other shape launch no
other.

Must not run inside pytest: which GPU Triton compiles for is the whole process's.
"""

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from proa_engine.config import EngineConfig
from proa_engine.kernels.variants import Variant, record
from proa_engine.speculative_config import SpeculativeConfig
from proa_engine.worker.meta_worker import MetaWorker
from proa_engine.worker.model_runner import ModelRunner
from proa_engine.worker.warmup import GREEDY, LIMITED, PENALIZED, decode_step, finish_step, prefill_step
from support import shape_models as models
from support.shape_models import make_shape_model, stored_as

MOST_SHARED_MEMORY = 227 * 1024  # bytes a program, on Hopper


@dataclass(frozen=True, slots=True)
class Case:
    model: models.Fields
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine

    @property
    def num_drafts(self) -> int:
        drafts = self.settings.get("speculative_config")
        return 0 if drafts is None else drafts.num_speculative_tokens


CASES = {
    "plain": [
        Case(models.LLAMA_8B),
        Case(models.MISTRAL_7B),
        Case(models.QWEN2_05B),
        Case(models.QWEN3_06B),
        Case(models.QWEN3_06B, {"dtype": "float16"}),
        Case(models.QWEN3_06B, {"dtype": "float32"}),
        Case(models.QWEN3_06B, {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=5)}),
        Case(models.QWEN3_06B, {"batch_invariant": True}),
        Case(
            models.LLAMA_8B,
            {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=32)},
        ),
        Case(models.QWEN3_30B_A3B),
    ],
    "quantized": [
        Case(models.LLAMA_8B, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        Case(stored_as(models.LLAMA_8B, models.FP8_STATIC)),
        Case(stored_as(models.LLAMA_8B, models.FP8_BLOCKS)),
        Case(stored_as(models.LLAMA_8B, models.GPTQ)),
        Case(stored_as(models.LLAMA_8B, models.GPTQ_OUT_OF_ORDER)),
        Case(models.QWEN3_30B_A3B, {"quantization": "fp8"}),
        Case(stored_as(models.QWEN3_30B_A3B, models.FP8_BLOCKS)),
    ],
}


def variants_of(case: Case) -> set[Variant]:
    """The variants that an engine compiles when it starts."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_shape_model(Path(folder), case.model))
        worker = MetaWorker(EngineConfig(**{"model": model, "dtype": "bfloat16"} | case.settings))
        at_start = set(record(worker.run_start))
    odd_steps = record(lambda: run_odd_steps(worker.model_runner, min(case.num_drafts, 2)))
    later = {variant.name for variant in set(odd_steps) - at_start}
    assert not later, f"{case}: compiled while requests wait: {later}"
    return at_start


def run_odd_steps(runner: ModelRunner, num_drafts: int) -> None:
    for lengths in ([1], [7], [64], [129, 1, 33, 300], [5] * 17, [4000, 777]):
        for params in (GREEDY, LIMITED, PENALIZED):
            prefill = prefill_step(sorted(lengths), block_size=16, num_blocks=999, params=params)
            names = list(prefill.num_scheduled_tokens)
            drafted = decode_step(names[:1], min(lengths), 1 + num_drafts)
            for step in (prefill, decode_step(names, 1), decode_step(names[:3], 2), drafted):
                inputs = runner.prepare_inputs(step)
                assert inputs is not None
                runner.execute_model(inputs)
                runner.sample_tokens()
            runner.prepare_inputs(finish_step(names))


def compile_variant(variant: Variant) -> str:
    compiled = variant.compile()
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= MOST_SHARED_MEMORY, f"{variant.name}: {compiled.metadata.shared} bytes"
    return variant.name


def main(group: str) -> None:
    variants = set.union(*map(variants_of, CASES[group]))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for name in pool.map(compile_variant, sorted(variants, key=lambda variant: variant.specialization)):
            print(name, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
