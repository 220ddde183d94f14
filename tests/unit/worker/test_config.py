"""EngineConfig rejects values out of range, naming the field."""

from dataclasses import replace
from typing import Any

import pytest

from proa.contract import ImageInput
from proa_engine.config import EngineConfig
from proa_engine.executor import make_executor
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.option_groups import Parallel


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_model_len", 1, "max_model_len must be at least 2, got 1"),
        ("block_size", 0, "block_size must be at least 1, got 0"),
        ("block_size", 24, "block_size must be a power of two, got 24"),
        ("block_size", 1024, "block_size must be at most 512, got 1024"),
        ("max_num_seqs", 65_536, "max_num_seqs must be at most 65000, got 65536"),
        ("dtype", "float8", "dtype must be one of auto, float32, float, float16, half, bfloat16, got float8"),
        ("kv_cache_dtype", "fp8_e5m2", "kv_cache_dtype must be one of auto, float32, .*, fp8_e4m3, got fp8_e5m2"),
        ("scheduling_policy", "lifo", "scheduling_policy must be one of fcfs, priority, got lifo"),
        ("gpu_memory_utilization", 1.1, "gpu_memory_utilization must be above 0 and at most 1, got 1.1"),
        ("encoder_cache_size", 0, "encoder_cache_size must be at least 1, got 0"),
        ("mm_processor_cache_gb", -1.0, "mm_processor_cache_gb must be at least 0, got -1.0"),
        ("role", "encode", "role must be one of both, prefill, decode, got encode"),
        ("role", "prefill", "role prefill needs kv_transfer_address"),
        ("worker_sockets", ("/run/1.sock",), "worker_sockets must name one for each rank from 1, 0 of 1 ranks, got 1"),
        ("node_rank", 1, r"node_rank must be below nnodes \(1\), got 1"),
        ("master_port", 0, "master_port must be at least 1, got 0"),
    ],
)
def test_value_out_of_range_is_rejected(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options(model="m", **{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"master_addr": None}, "nnodes above 1 needs master_addr"),
        ({"tensor_parallel_size": 3}, r"the number of ranks \(3\) cannot be divided by nnodes \(2\)"),
        ({"worker_sockets": ("/run/1.sock",)}, "worker_sockets cannot be used with nnodes above 1"),
        ({"kv_transfer_address": ":1", "kv_offloading_size": 1.0}, "kv_transfer_address cannot be used with nnodes"),
        ({"kv_offloading_path": "/d", "kv_offloading_size": 1.0}, "kv_offloading_path cannot be used with nnodes"),
        ({"kv_disk_path": "/d", "kv_disk_size": 1.0, "kv_offloading_size": 1.0}, "kv_disk_path cannot be used"),
    ],
)
def test_what_does_not_work_on_several_nodes_is_refused(fields: dict[str, Any], message: str) -> None:
    nodes: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "10.0.0.1"}
    assert EngineConfig.from_options(model="m", kv_offloading_size=1.0, **nodes).parallel.ranks_here == 1
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options(model="m", **(nodes | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=2)},
        {"kv_transfer_address": ":1", "kv_offloading_size": 1.0},
        {"kv_offloading_path": "/d", "kv_offloading_size": 1.0},
        {"kv_disk_path": "/d", "kv_disk_size": 1.0, "kv_offloading_size": 1.0},
    ],
)
def test_what_does_not_work_with_pipeline_stages_is_refused(fields: dict[str, Any]) -> None:
    EngineConfig.from_options(model="m", **fields)
    with pytest.raises(ValueError, match=f"{next(iter(fields))} cannot be used with pipeline_parallel_size above 1"):
        EngineConfig.from_options(model="m", pipeline_parallel_size=2, **fields)


def test_each_stage_has_the_tensor_parallel_ranks() -> None:
    sizes: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    assert EngineConfig.from_options(model="m", **sizes).parallel.num_ranks == 6
    EngineConfig.from_options(model="m", worker_sockets=tuple(f"/run/{rank}" for rank in range(1, 6)), **sizes)
    with pytest.raises(ValueError, match="5 of 6 ranks, got 1"):
        EngineConfig.from_options(model="m", worker_sockets=("/run/1",), **sizes)


def test_sizes_are_unset_by_default() -> None:
    config = EngineConfig(model="m")
    assert (config.max_model_len, config.kv_cache_memory_bytes, config.num_gpu_blocks_override) == (None, None, None)


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({}, 8192),
        ({"max_num_batched_tokens": 100}, 256),
        ({"encoder_cache_size": 64}, 64),
        ({"language_model_only": True}, 0),
    ],
)
def test_encoder_cache_holds_the_largest_image_and_a_step_unless_its_size_is_set(
    fields: dict[str, Any], num_tokens: int
) -> None:
    images = ImageInput(token_id=9, token="<image>", placeholder="<image>", unit=32, max_pixels=512 * 512, resample=3)
    config = EngineConfig.from_options(model="m", **fields)
    assert config.num_encoder_cache_tokens(images) == num_tokens
    assert config.num_encoder_cache_tokens(replace(images, max_pixels=0, side=512)) == num_tokens
    assert config.num_encoder_cache_tokens(None) == 0


def test_only_node_0_is_an_engine() -> None:
    other = EngineConfig(
        model="m", parallel=Parallel(tensor_parallel_size=2, nnodes=2, node_rank=1, master_addr="10.0.0.1")
    )
    with pytest.raises(ValueError, match="node_rank must be 0 for an engine: node 1 is run by `proa-engine serve`"):
        make_executor(other, print)
