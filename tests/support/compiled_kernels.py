"""Run as a program, on a machine with or without a GPU: compiles for Hopper every kernel variant that engines with
these models (more of them if tests are thorough) launch from their start on, prints what each uses, a line of JSON a
variant, and checks that steps of any other shape launch no other. With a compute capability as argument, 100 for 10.0,
it does so for that GPU, with the smallest model (and those with 4-bit weights, if tests are thorough).

Must not run inside pytest: which GPU Triton compiles for is the whole process's.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from proa.contract import ImageInput
from proa_engine.config import EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.types import BASE_MODEL, EMPTY_LORA, EncoderInput, LoraSlot, MediaSpan
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.kernels.fp8 import FP8_CAPABILITY
from proa_engine.kernels.variants import Variant, record
from proa_engine.memory.kv_cache import CacheSizes, cache_groups, image_of
from proa_engine.step.model_runner import ModelRunner
from proa_engine.worker.meta_worker import MetaWorker
from proa_engine.worker.warmup import LIMITED, PENALIZED
from proa_engine.worker.warmup_steps import GREEDY, MEDIA_HASH, decode_step, finish_step, prefill_step
from support import shape_models as models
from support.kernel_facts import GPUS, HOPPER, Gpu, facts_of
from support.masks import masks_of
from support.shape_models import make_shape_model, stored_as
from support.thorough import THOROUGH

_NUM_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: models.Fields
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine
    drafter: models.Fields = field(default_factory=dict)  # of the drafter's config.json, if it has one of its own

    @property
    def num_drafts(self) -> int:
        drafts = self.settings.get("speculative_config")
        return 0 if drafts is None else drafts.max_drafts

    @property
    def has_fp8(self) -> bool:
        """Whether weights or KV cache are 8-bit floats, which a GPU may lack."""
        stored = self.model.get("quantization_config", {})
        return "fp8" in (stored.get("quant_method"), *self.settings.values())


_LORA = {"enable_lora": True}
_FP8_CACHE = {"kv_cache_dtype": "fp8"}
_INVARIANT = {"batch_invariant": True}
_NGRAM = {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=5)}
_DIVIDED = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}
_FOUR_RANKS = {"tensor_parallel_size": 4}
_MTP = {"speculative_config": SpeculativeConfig(method="mtp", num_speculative_tokens=5)}
_DFLASH = {"speculative_config": SpeculativeConfig(method="dflash", model="drafter", num_speculative_tokens=15)}
_DSPARK = {"speculative_config": SpeculativeConfig(method="dspark", model="drafter", num_speculative_tokens=7)}
_MANY_DRAFTS = {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=32)}
SMALL = Case("Qwen3-0.6B", models.QWEN3_06B)
# Together they launch every kernel.
CASES = [
    Case("Llama-3.1-8B", models.LLAMA_8B),
    Case("Llama-3.1-8B fp8, fp8 KV", models.LLAMA_8B, {"quantization": "fp8"} | _FP8_CACHE),
    Case("Llama-3.1-8B fp8 blocks", stored_as(models.LLAMA_8B, models.FP8_BLOCKS)),
    Case("Llama-3.1-8B int8", stored_as(models.LLAMA_8B, models.INT8)),
    Case("Llama-3.1-8B nvfp4", stored_as(models.LLAMA_8B, models.NVFP4)),
    Case("Llama-3.1-8B GPTQ", stored_as(models.LLAMA_8B, models.GPTQ)),
    SMALL,
    Case("Qwen3-0.6B adapters, invariant, n-gram", models.QWEN3_06B, _LORA | _INVARIANT | _NGRAM),
    Case("heads of 256, fp8 KV", models.WIDE_HEADS, _FP8_CACHE),
    Case("Qwen3-30B-A3B", models.QWEN3_30B_A3B),
    Case("gpt-oss-20b", models.GPT_OSS_20B),
    Case("GLM-4.7-Flash n-gram", models.GLM_47_FLASH, _NGRAM),
    Case("Gemma-3-4B", models.GEMMA3_4B),
    Case("Qwen3.5-35B-A3B", models.QWEN35_35B_A3B),
    Case("Qwen3.5-35B-A3B MTP", models.QWEN35_35B_A3B, _MTP),
    Case("Qwen3.5-35B-A3B DFlash", models.QWEN35_35B_A3B, _DFLASH, models.DFLASH_QWEN35_35B_A3B),
    Case("LFM2-8B-A1B", models.LFM2_8B_A1B),
    Case("Nemotron-3-Nano n-gram", models.NEMOTRON_3_NANO, _NGRAM),
    Case("Qwen3-30B-A3B fp8", models.QWEN3_30B_A3B, {"quantization": "fp8"}),
    Case("Qwen3-30B-A3B AWQ", stored_as(models.QWEN3_30B_A3B, models.AWQ)),
    Case("Qwen3-30B-A3B nvfp4", stored_as(models.QWEN3_30B_A3B, models.NVFP4)),
]
MORE_CASES = [
    Case("Llama-3.1-8B static fp8", stored_as(models.LLAMA_8B, models.FP8_STATIC)),
    Case("Llama-3.1-8B mxfp4", stored_as(models.LLAMA_8B, models.MXFP4_PACKED)),
    Case("Llama-3.1-8B GPTQ out of order", stored_as(models.LLAMA_8B, models.GPTQ_OUT_OF_ORDER)),
    Case(
        "Llama-3.1-8B GPTQ out of order, four ranks", stored_as(models.LLAMA_8B, models.GPTQ_OUT_OF_ORDER), _FOUR_RANKS
    ),
    Case("Llama-3.1-8B GPTQ 8 bits", stored_as(models.LLAMA_8B, models.GPTQ_8_BITS)),
    Case("Llama-3.1-8B n-gram of 32", models.LLAMA_8B, _MANY_DRAFTS),
    Case("Llama-3.1-8B fp8, adapters", models.LLAMA_8B, {"quantization": "fp8"} | _LORA),
    Case("Mistral-7B", models.MISTRAL_7B),
    Case("Qwen2-0.5B", models.QWEN2_05B),
    Case("Qwen2-0.5B fp8 KV", models.QWEN2_05B, _FP8_CACHE),
    Case("Qwen2-0.5B invariant", models.QWEN2_05B, _INVARIANT),
    Case("Qwen3-0.6B float16", models.QWEN3_06B, {"dtype": "float16"}),
    Case("Qwen3-0.6B float32", models.QWEN3_06B, {"dtype": "float32"}),
    Case("Qwen3-0.6B adapters", models.QWEN3_06B, _LORA | {"max_lora_rank": 64}),
    Case("Qwen3-0.6B n-gram", models.QWEN3_06B, _NGRAM),
    Case("Qwen3-0.6B invariant", models.QWEN3_06B, _INVARIANT),
    Case("Qwen3-0.6B invariant, DSpark", models.QWEN3_06B, _INVARIANT | _DSPARK, models.DSPARK_QWEN3_06B),
    Case("Qwen3-0.6B invariant, fp8 KV", models.QWEN3_06B, _INVARIANT | _FP8_CACHE),
    Case("heads of 256", models.WIDE_HEADS),
    Case("heads of 256, invariant", models.WIDE_HEADS, _INVARIANT),
    Case("heads of 256, invariant, fp8 KV", models.WIDE_HEADS, _INVARIANT | _FP8_CACHE),
    Case("heads of 512", models.WIDEST_HEADS),
    Case("GLM-4.7-Flash", models.GLM_47_FLASH),
    Case("GLM-4.7-Flash MTP", models.GLM_47_FLASH, _MTP),
    Case("GLM-4.7-Flash, latents divided among ranks", models.GLM_47_FLASH, _NGRAM | _DIVIDED),
    Case("Gemma-2-9B", models.GEMMA2_9B),
    Case("Gemma-3-4B invariant", models.GEMMA3_4B, _INVARIANT),
    Case("Gemma-4-E4B", models.GEMMA4_E4B),
    Case("GLM-4-9B", models.GLM4_9B),
    Case("Qwen3.5-4B invariant", models.QWEN35_4B, _INVARIANT),
    Case("Qwen3.5-4B invariant, n-gram", models.QWEN35_4B, _INVARIANT | _NGRAM),
    Case("LFM2-8B-A1B n-gram", models.LFM2_8B_A1B, _NGRAM),
    Case("Nemotron-3-Nano", models.NEMOTRON_3_NANO),
    Case("Nemotron-3-Nano fp8", models.NEMOTRON_3_NANO, {"quantization": "fp8"}),
    Case("Whisper large-v3-turbo", models.WHISPER_TURBO),
    Case("Granite-4.0-H-Tiny", models.GRANITE_4_TINY),
    Case("Qwen3-30B-A3B fp8 blocks", stored_as(models.QWEN3_30B_A3B, models.FP8_BLOCKS)),
    Case("Qwen3-30B-A3B fp8 blocks, whole experts", stored_as(models.QWEN3_30B_A3B, models.FP8_BLOCKS), _FOUR_RANKS),
    Case(
        "Qwen3-30B-A3B AWQ groups of 32, four ranks",
        stored_as(models.QWEN3_30B_A3B, models.AWQ_GROUPS_OF_32),
        _FOUR_RANKS,
    ),
    Case("Qwen3-30B-A3B GGUF", stored_as(models.QWEN3_30B_A3B, models.GGUF)),
    Case("Qwen3-30B-A3B GPTQ 8 bits", stored_as(models.QWEN3_30B_A3B, models.GPTQ_8_BITS)),
    Case("Qwen3-30B-A3B int8", stored_as(models.QWEN3_30B_A3B, models.INT8)),
    Case("gpt-oss-20b, whole experts", models.GPT_OSS_20B, _FOUR_RANKS),
]


def cases_for(cases: Sequence[Case], gpu: Gpu) -> list[Case]:
    """Those that an engine does not refuse on this GPU."""
    return [case for case in cases if gpu.capability >= FP8_CAPABILITY or not case.has_fp8]


def cases_for_other_gpus() -> list[Case]:
    with_4_bits = [case for case in CASES if case.name in ("Llama-3.1-8B nvfp4", "Llama-3.1-8B GPTQ", "gpt-oss-20b")]
    return [SMALL, *with_4_bits] if THOROUGH else [SMALL]


def variants_of(case: Case, gpu: Gpu) -> set[Variant]:
    """The variants that an engine compiles when it starts."""
    find = partial(record, target=gpu.target, multiprocessors=gpu.multiprocessors)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"model": str(make_shape_model(Path(folder) / "model", case.model)), "dtype": "bfloat16"}
        settings |= case.settings
        if case.drafter:
            drafter = str(make_shape_model(Path(folder) / "drafter", case.drafter))
            settings["speculative_config"] = replace(case.settings["speculative_config"], model=drafter)
        worker = MetaWorker(EngineConfig.from_options(**settings))
        at_start = set(find(worker.run_start))
    loras = [BASE_MODEL, LoraSlot(EMPTY_LORA, 1)] if case.settings.get("enable_lora") else [BASE_MODEL]
    odd_steps = [variant for lora in loras for variant in find(partial(run_odd_steps, worker, case, lora))]
    later = {variant.name for variant in set(odd_steps) - at_start}
    assert not later, f"{case.name}: compiled while requests wait: {later}"
    return at_start


def run_odd_steps(worker: MetaWorker, case: Case, lora: LoraSlot) -> None:
    num_drafts = min(case.num_drafts, 2)
    runner = worker.model_runner
    sizes = CacheSizes(num_blocks=999, num_state_slots=999, max_num_seqs=999)
    groups = cache_groups(worker._config, worker._caches, sizes)
    masks = masks_of({0: [1, 5]}, worker.model_config.vocab_size)
    for lengths in ([1], [7], [64], [129, 1, 33, 300], [5] * 17, [4000, 777]):
        for params in (GREEDY, LIMITED, PENALIZED):
            prefill = prefill_step(sorted(lengths), groups, params, lora)
            names = list(prefill.num_scheduled_tokens)
            prefill.grammar_rows = [0]
            drafted = [decode_step(names[:count], min(lengths), 1 + num_drafts) for count in (1, 3)]  # replayed, or not
            for step in (prefill, decode_step(names, 1), decode_step(names[:3], 2), *drafted):
                inputs = runner.prepare_inputs(step)
                assert inputs is not None
                runner.execute_model(inputs)
                runner.sample_tokens(masks if step is prefill else None)
            runner.prepare_inputs(finish_step(names))
    if worker.model_config.images is not None:
        run_images(runner, worker.model_config.images.input, groups)


def run_images(runner: ModelRunner, image_input: ImageInput, groups: CacheGroups) -> None:
    """An image within a prompt, beside another prompt, at each of many places in the block tables."""
    height, width = image_of(image_input, 256)
    num_tokens = image_input.num_tokens(height, width)
    image = EncoderInput(MEDIA_HASH, (height, width, 3), bytes(height * width * 3))
    for before in (3, 20, 33):
        step = prefill_step([5, before + num_tokens + 7], groups, GREEDY)
        span = MediaSpan(MEDIA_HASH, before, num_tokens, (height, width, 3))
        step.new_requests[1] = replace(step.new_requests[1], media=(span,))
        for each in (
            replace(step, encoder_inputs=[image]),
            replace(prefill_step([1], groups), freed_media=[image.hash]),
        ):
            inputs = runner.prepare_inputs(each)
            assert inputs is not None
            runner.execute_model(inputs)
            runner.sample_tokens(None)
            runner.prepare_inputs(finish_step(list(each.num_scheduled_tokens)))


def users(cases: Sequence[Case], pool: Executor, gpu: Gpu) -> dict[Variant, list[str]]:
    """Every variant with the names of the cases that launch it, in the order of the kernels' names."""
    found: dict[Variant, list[str]] = defaultdict(list)
    for case, variants in zip(cases, pool.map(partial(variants_of, gpu=gpu), cases), strict=True):
        for variant in variants:
            found[variant].append(case.name)
    return dict(sorted(found.items(), key=lambda item: item[0].specialization))


def make_pool() -> Executor:
    """Processes that find and compile variants."""
    return ProcessPoolExecutor(_NUM_PROCESSES, get_context("spawn"))


def main(argv: Sequence[str]) -> None:
    gpu = GPUS[int(argv[0])] if argv else HOPPER
    cases = cases_for_other_gpus() if argv else [*CASES, *MORE_CASES] if THOROUGH else CASES
    with make_pool() as pool:
        names = users(cases, pool, gpu)
        for facts, used_by in zip(pool.map(partial(facts_of, gpu=gpu), names), names.values(), strict=True):
            print(json.dumps(asdict(facts) | {"cases": used_by}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
