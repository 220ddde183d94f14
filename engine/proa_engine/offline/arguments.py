"""The keyword arguments of `LLM`, with their types, so that editors complete them and type checkers check them."""

from collections.abc import Mapping
from typing import Any, TypedDict

from proa.lora_module import LoraModule
from proa_engine.config import (
    Device,
    DType,
    KvCacheDtype,
    LoadFormat,
    Role,
    Runner,
    SchedulingPolicy,
)


class EngineArguments(TypedDict, total=False):
    """The fields of `EngineConfig`, which describes them and has their defaults, that `LLM` passes on unchanged."""

    revision: str | None
    tokenizer: str | None
    skip_tokenizer_init: bool
    runner: Runner
    download_dir: str | None
    download_cache_size: int | None
    load_format: LoadFormat
    dtype: DType
    quantization: str | None
    kv_cache_dtype: KvCacheDtype
    seed: int
    hf_overrides: Mapping[str, Any] | None
    generation_config: str
    override_generation_config: Mapping[str, Any] | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting_requests: int
    block_size: int
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    kv_offloading_size: float
    kv_transfer_address: str | None
    kv_transfer_sources: tuple[str, ...]
    kv_offloading_path: str | None
    kv_disk_path: str | None
    kv_disk_size: float
    kv_disk_write_mb_per_second: float
    role: Role
    compile_cache: str | None
    async_scheduling: bool
    enforce_eager: bool
    batch_invariant: bool
    scheduling_policy: SchedulingPolicy
    max_logprobs: int
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_modules: tuple[LoraModule, ...]
    language_model_only: bool
    enable_prompt_embeds: bool
    encoder_cache_size: int | None
    mm_processor_cache_gb: float
    device: Device
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    nnodes: int
    node_rank: int
    master_addr: str | None
    master_port: int
    enable_expert_parallel: bool
    disable_custom_all_reduce: bool
    worker_sockets: tuple[str, ...]
