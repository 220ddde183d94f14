"""The KV cache that fits into a rank's memory beside the weights: on a CPU estimated, on a GPU measured."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from proa_engine.config import EngineConfig
from proa_engine.memory import kv_cache
from proa_engine.memory.arena_memory import existing_bytes
from proa_engine.memory.host import HostMemory, read_memory
from proa_engine.memory.kv_cache import CacheSizes
from proa_engine.memory.requirements import check_weights, weights_room
from proa_engine.models.config import ModelConfig
from proa_engine.step.model_runner import ModelRunner
from proa_engine.worker.device_memory import measure_memory
from proa_engine.worker.make_model_runner import LoadedModel, RunnerPlan, make_model_runner


def check_cpu_weights(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, ranks_here: int) -> None:
    """Raise `ValueError` if the weights do not fit, where `ranks_here` ranks, which have allocated nothing yet, share
    the container or machine."""
    weight_bytes = kv_cache.weight_bytes(model, dtype.itemsize, config.parallel.tensor_parallel_size)
    check_weights(weight_bytes, weights_room(_host_memory(config), ranks_here))


def sizes_that_fit(
    plan: RunnerPlan,
    loaded: LoadedModel,
    run_largest: Callable[[ModelRunner], object],
    *,
    max_model_len: int,
    ranks_here: int,
    log: Callable[[str], None],
) -> CacheSizes:
    """Return the largest KV cache that fits beside the loaded model.

    `plan` has all graphs and the smallest cache, with which a GPU is measured: `run_largest` runs the largest steps on
    a runner.
    """
    config, model, itemsize = plan.config, loaded.config, plan.placement.dtype.itemsize
    if plan.placement.device.type == "cuda":
        images = kv_cache.encoder_cache_bytes(config, model.images, itemsize, model.audios)
        num_bytes = _gpu_bytes(plan, loaded, run_largest, images, log)
        return kv_cache.gpu_sizes(num_bytes, config, plan.caches, max_model_len)
    budget = kv_cache.cpu_budget(
        _host_memory(config),
        utilization=config.gpu_memory_utilization,
        ranks_here=ranks_here,
        workspace=kv_cache.cpu_workspace(config, model, itemsize)
        + kv_cache.cpu_encoder_bytes(config, model.images, max_model_len, itemsize)
        + kv_cache.cpu_audio_bytes(config, model.audios, itemsize)
        + kv_cache.host_bytes(config),
    )
    return kv_cache.cpu_sizes(budget, config, plan.caches, max_model_len)


def _gpu_bytes(
    plan: RunnerPlan,
    loaded: LoadedModel,
    run_largest: Callable[[ModelRunner], object],
    encoded_images: int,
    log: Callable[[str], None],
) -> int:
    """Return the bytes for the KV cache, measured with the largest graphs. The inputs that the measured runner keeps of
    drafts are among these bytes, as `kv_cache.divide` has them."""
    largest = replace(plan, shapes=plan.shapes[-2:], prompt_shapes=plan.prompt_shapes[-2:])
    runner = make_model_runner(largest, loaded)
    usage = measure_memory(
        partial(run_largest, runner),
        runner.capture_graphs if plan.shapes else None,
        num_graphs=plan.num_graphs,
        utilization=plan.config.gpu_memory_utilization,
        encoded_images=encoded_images,
    )
    log(str(usage))
    del runner
    torch.cuda.empty_cache()
    kept = plan.sizes.max_num_seqs * kv_cache.num_kept_tokens(plan.config) * plan.caches.input_bytes
    return usage.available + kept


def _host_memory(config: EngineConfig) -> HostMemory:
    """Return the memory of this machine. What an earlier engine has left in the host tier's files is available."""
    memory, folder = read_memory(), config.kv_tiers.kv_offloading_path
    return memory if folder is None else replace(memory, available=memory.available + existing_bytes(Path(folder)))
