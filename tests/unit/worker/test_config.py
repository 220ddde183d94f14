"""EngineConfig rejects values out of range, naming the field."""

from dataclasses import replace
from typing import Any

import pytest

from proa.contract import ImageInput
from proa_engine.config import EngineConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_model_len", 1, "max_model_len must be at least 2, got 1"),
        ("block_size", 0, "block_size must be at least 1, got 0"),
        ("dtype", "float8", "dtype must be one of auto, float32, float, float16, half, bfloat16, got float8"),
        ("quantization", "int3", "quantization must be one of awq, compressed-tensors, fp8, gptq, got int3"),
        ("kv_cache_dtype", "fp8_e5m2", "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, got fp8_e5m2"),
        ("scheduling_policy", "lifo", "scheduling_policy must be one of fcfs, priority, got lifo"),
        ("gpu_memory_utilization", 1.1, "gpu_memory_utilization must be above 0 and at most 1, got 1.1"),
        ("encoder_cache_size", 0, "encoder_cache_size must be at least 1, got 0"),
        ("mm_processor_cache_gb", -1.0, "mm_processor_cache_gb must be at least 0, got -1.0"),
        ("role", "encode", "role must be one of both, prefill, decode, got encode"),
        ("role", "prefill", "role prefill needs kv_transfer_address"),
        ("worker_sockets", ("/run/1.sock",), "worker_sockets must name one for each rank from 1, 0 for .* got 1"),
    ],
)
def test_value_out_of_range_is_rejected(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", **{field: value})


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
    config = EngineConfig(model="m", **fields)
    assert config.num_encoder_cache_tokens(images) == num_tokens
    assert config.num_encoder_cache_tokens(replace(images, max_pixels=0, side=512)) == num_tokens
    assert config.num_encoder_cache_tokens(None) == 0
