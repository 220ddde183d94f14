"""EngineConfig rejects values out of range, naming the field."""

from typing import Any

import pytest

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
        ("worker_sockets", ("/run/1.sock",), "worker_sockets must name one for each rank from 1, 0 for .* got 1"),
    ],
)
def test_value_out_of_range_is_rejected(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", **{field: value})


def test_sizes_are_unset_by_default() -> None:
    config = EngineConfig(model="m")
    assert (config.max_model_len, config.kv_cache_memory_bytes, config.num_gpu_blocks_override) == (None, None, None)
