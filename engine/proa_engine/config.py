"""EngineConfig: every choice of an engine, made once, passed explicitly. Field names are vLLM's where it has them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the command line, the offline `LLM` and the tests ask for. `None` means: decide from model and machine."""

    model: str
    revision: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # auto: float32 on a CPU, else the model's own
    seed: int = 0  # of dummy weights

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_waiting_requests: int = 4096
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_logprobs: int = 20

    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel_size: int = 1
    worker_sockets: tuple[str, ...] = ()  # one Unix socket for each rank from 1 that runs as a sidecar; empty: spawn
