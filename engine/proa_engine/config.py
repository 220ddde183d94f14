"""EngineConfig: every choice of an engine, made once, passed explicitly. Field names are vLLM's where it has them."""

from dataclasses import dataclass
from typing import Literal, get_args

from proa_engine.speculative_config import SpeculativeConfig

LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "float32", "float", "float16", "half", "bfloat16"]
SchedulingPolicy = Literal["fcfs", "priority"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
Quantization = Literal["awq", "compressed-tensors", "fp8", "gptq"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the command line, the offline `LLM` and the tests ask for. `None` means: decide from model and machine.

    Raises `ValueError` naming the field that cannot be.
    """

    model: str
    revision: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    load_format: LoadFormat = "auto"
    dtype: DType = "auto"  # auto: float32 on a CPU, else the model's own
    quantization: Quantization | None = None  # None: as the checkpoint is
    kv_cache_dtype: KvCacheDtype = "auto"  # auto: that of the model; fp8 is fp8_e4m3
    seed: int = 0  # of dummy weights, and offline of requests that have none of their own

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
    enforce_eager: bool = False  # on a GPU: no CUDA graphs
    batch_invariant: bool = False  # a request's logits do not depend on its batch and chunks; on a CPU always so
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_logprobs: int = 20
    speculative_config: SpeculativeConfig | None = None  # None: no drafts

    device: Device = "auto"
    tensor_parallel_size: int = 1
    worker_sockets: tuple[str, ...] = ()  # one Unix socket for each rank from 1 that runs as a sidecar; empty: spawn

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name, choice in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in get_args(choice):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choice))}, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")
        if self.worker_sockets and len(self.worker_sockets) != self.tensor_parallel_size - 1:
            raise ValueError(
                f"worker_sockets must name one for each rank from 1, {self.tensor_parallel_size - 1} for "
                f"tensor_parallel_size {self.tensor_parallel_size}, got {len(self.worker_sockets)}"
            )

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or ("proa-builtin" if self.model == "builtin" else self.model)

    @property
    def num_speculative_tokens(self) -> int:
        """Most draft tokens that a request's decode carries."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens


_LEAST = {
    "max_model_len": 2,  # a prompt and an output
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_waiting_requests": 1,
    "block_size": 1,
    "num_gpu_blocks_override": 1,
    "kv_cache_memory_bytes": 1,
    "max_logprobs": 0,
    "tensor_parallel_size": 1,
}
_CHOICES = {
    "load_format": LoadFormat,
    "dtype": DType,
    "quantization": Quantization,
    "kv_cache_dtype": KvCacheDtype,
    "scheduling_policy": SchedulingPolicy,
    "device": Device,
}
