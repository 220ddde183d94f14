"""Run as a program, it compiles the kernels with the largest tiles for an L4, without a GPU, and prints the bytes of
shared memory each takes. In a process of its own, because which GPU Triton compiles for is the whole process's."""

import tempfile
from functools import partial
from pathlib import Path

from proa_engine.config import EngineConfig
from proa_engine.kernels.variants import Variant, record
from proa_engine.worker.meta_worker import run_starts
from support import shape_models as models
from support.kernel_facts import GPUS
from support.shape_models import make_shape_model

L4 = GPUS[89]
MODELS = [models.WIDE_HEADS, models.WIDEST_HEADS, models.GLM_47_FLASH, models.QWEN35_35B_A3B]
LARGEST = ("prefill_attention_kernel", "decode_attention_kernel", "latent_", "delta_rule_")


def main() -> None:
    variants: set[Variant] = set()
    for fields in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            config = EngineConfig(model=str(make_shape_model(Path(folder), fields)), dtype="bfloat16")
            variants.update(record(partial(run_starts, config), L4.target, L4.multiprocessors))
    for variant in variants:
        name = variant.name.rpartition(".")[2]
        if name.startswith(LARGEST):
            print(name, variant.compile(L4.target).metadata.shared, flush=True)


if __name__ == "__main__":
    main()
