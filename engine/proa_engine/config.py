"""EngineConfig: the configuration of an engine. Field names are vLLM's where vLLM has the field.

Each field is a flag of `proa-engine serve`, an argument of the offline `LLM`, and is checked here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, Literal

from proa.contract import ImageInput
from proa.lora_module import LoraModule
from proa.options import REQUIRED, check_options, masked_repr, option, parse_count
from proa_engine.json_configs import PoolerConfig, SpeculativeConfig, check_sampling_defaults, json_object

LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "float32", "float", "float16", "half", "bfloat16"]
SchedulingPolicy = Literal["fcfs", "priority"]
KvCacheDtype = Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3"]
Runner = Literal["auto", "generate", "pooling"]
Device = Literal["auto", "cpu", "cuda"]
Role = Literal["both", "prefill", "decode"]
FITTING_LENGTH = -1
"""The `max_model_len` of vLLM's `auto`: the model's context length, or what the KV cache has room for if that is
less."""
_ADDRESS = re.compile(r".*:\d{1,5}")
_HOST_NAME = re.compile(r"\w([\w.-]*\w)?\.?", re.ASCII)
LOOPBACK = ("127.0.0.0/8", "::1", "localhost")


def _is_network(text: str) -> bool:
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _parse_length(text: str) -> int:
    return FITTING_LENGTH if text.strip().lower() == "auto" else parse_count(text)


@dataclass(frozen=True, slots=True)
class PeerTls:
    """Paths of the PEM files with which engines, and the nodes of an engine, know each other."""

    certificate_file: str
    key_file: str
    authority_file: str


@dataclass(frozen=True, slots=True)
class Downloads:
    """`folder`: of downloads; None: the hub's cache. `max_bytes`: maximum of those from object stores; None: what
    the disk has room for."""

    folder: str | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises `ValueError` naming the field that is out of range. `None`: the engine chooses by model and machine."""

    model: str = option(
        REQUIRED,
        "`builtin`, a directory in Hugging Face layout, a Hugging Face Hub id, or a prefix in an object store: "
        "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX",
    )
    revision: str | None = option(None, "branch, tag or commit of a Hub model")
    served_model_name: tuple[str, ...] = option(
        (),
        "model name in the API; repeat for several, of which the first is that of responses and metrics (default: the "
        "value of --model; proa-builtin for `builtin`)",
        metavar="NAME",
    )
    tokenizer: str | None = option(
        None, "directory, Hub id or object store URL of the tokenizer (default: the model's own)"
    )
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts and outputs are token ids only")
    runner: Runner = option(
        "auto",
        "`pooling`: use a causal language model for embeddings, without its LM head; `generate`: refuse a model that "
        "has none (auto: what the model's files are for)",
    )
    pooler_config: PoolerConfig | None = option(
        None,
        'changes of the model\'s pooling, as JSON: {"task": "token_embed", "pooling_type": "MEAN", "use_activation": '
        'false, "enable_chunked_processing": true, "max_embed_len": 10000} (default: as the model\'s files say)',
        metavar="JSON",
        parse=PoolerConfig.from_json,
    )
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        'changes of the model\'s config.json, as JSON: {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}. '
        "Objects are changed field by field, null removes a field (default: none)",
        metavar="JSON",
        parse=json_object,
    )
    generation_config: str = option(
        "auto",
        "where the sampling parameters of requests without them come from: the model's generation_config.json (auto), "
        "that of another folder, or none (vllm)",
        metavar="auto|vllm|FOLDER",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        'changes of these sampling parameters, as JSON: {"temperature": 0.6, "top_p": 0.95} (default: none)',
        metavar="JSON",
        parse=json_object,
    )
    download_dir: str | None = option(
        None,
        "folder in which downloads from the hub and from object stores are kept; processes of one machine share it "
        "(default: the hub's cache, HF_HUB_CACHE)",
        metavar="FOLDER",
    )
    download_cache_size: int | None = option(
        None,
        "maximum bytes of all files from object stores in download_dir, such as 500g: those that were used least "
        "recently, and that no process uses, are deleted (default: what the disk has room for)",
        metavar="BYTES",
        parse=parse_count,
        minimum=1,
    )
    load_format: LoadFormat = option("auto", "`dummy`: random weights with the model's shapes")
    dtype: DType = option("auto", "type of weights and activations (auto: float32 on a CPU, else the model's own)")
    quantization: str | None = option(
        None,
        "quantization method; `fp8` and `fp8_per_block` quantize an unquantized checkpoint (default: the checkpoint's "
        "own)",
        metavar="NAME",
    )
    kv_cache_dtype: KvCacheDtype = option(
        "auto",
        "type of the KV cache (auto: the checkpoint's, else that of activations; fp8: e4m3, half the memory "
        "of bfloat16; the others: that of activations, which it must be)",
    )
    seed: int = option(0, "seed of dummy weights, and offline of requests without a seed of their own")

    max_model_len: int | None = option(
        None,
        "maximum tokens of prompt and output together, such as 32k (32,000) or 32K (32,768); auto or -1: the model's "
        "context length, or less if the KV cache has no room for it (default: the model's context length)",
        parse=_parse_length,
    )
    # A row of a CUDA grid for each, and some hundred more, of which there are at most 65,535. Their tokens together,
    # those of shared prefixes counted for each, must be fewer than 2**31: `decode_plan` adds them as int32.
    max_num_seqs: int = option(256, "maximum requests running at once", minimum=1, maximum=65_000)
    max_num_batched_tokens: int = option(
        8192, "maximum tokens computed in one step, such as 8K", parse=parse_count, minimum=1
    )
    max_waiting_requests: int = option(4096, "maximum waiting requests; more are rejected", minimum=1)
    block_size: int = option(16, "tokens in a KV cache block, a power of two", minimum=1, maximum=512)
    num_gpu_blocks_override: int | None = option(
        None, "number of KV cache blocks (default: as many as fit into memory and requests can use)", minimum=1
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the KV cache in bytes, such as 20G (default: as large as fits into memory). No memory is measured: "
        "the weights, the largest step and CUDA graphs must fit beside it",
        parse=parse_count,
        minimum=1,
    )
    gpu_memory_utilization: float = option(0.9, "fraction of the device's memory to use, above 0 and at most 1")
    enable_prefix_caching: bool = option(True, "reuse the KV cache of equal prompt prefixes")
    kv_offloading_size: float = option(
        0.0,
        "host memory in GiB, of all ranks together, for KV cache blocks that the device has evicted: a request whose "
        "prefix is there loads it instead of computing it; 0: none",
        minimum=0,
    )
    kv_transfer_address: str | None = option(
        None,
        "HOST:PORT on which rank 0 exchanges KV cache blocks with other engines; rank r listens on the port plus r; "
        "port 0: any free port; empty host: all addresses. With the engine's certificate and authority (--tls-cert, "
        "--tls-ca) if it has them, otherwise in plaintext. Needs kv_offloading_size (default: none)",
        metavar="HOST:PORT",
    )
    kv_transfer_sources: tuple[str, ...] = option(
        LOOPBACK,
        "engines from which KV cache blocks may be fetched, as networks (10.1.0.0/16), addresses or host names; repeat "
        "for several. A request cannot name any other one as its source, because what a source sends serves later "
        "requests too (default: this machine, 127.0.0.0/8, ::1 and localhost)",
        metavar="NETWORK",
    )
    kv_offloading_path: str | None = option(
        None,
        "folder in memory, such as /dev/shm/proa, in which each rank keeps the host memory of kv_offloading_size as a "
        "file: an engine that is started again, with the same weights and configuration, continues with its blocks. "
        "Only one engine can use a folder (default: memory that ends with the engine)",
        metavar="FOLDER",
    )
    kv_disk_path: str | None = option(
        None,
        "folder on a disk to which each rank writes KV cache blocks that requests have read from host memory, and from "
        "which later engines of the same model read them. Needs kv_offloading_size (default: none)",
        metavar="FOLDER",
    )
    kv_disk_size: float = option(0.0, "size of the files in kv_disk_path in GiB, of all ranks together", minimum=0)
    kv_disk_write_mb_per_second: float = option(
        200.0, "maximum megabytes a second that each rank writes to kv_disk_path", minimum=1
    )
    role: Role = option(
        "both",
        "what gateways send to this engine. `prefill`: the prompts of requests that another engine answers; `decode`: "
        "requests, of which engines of role prefill compute the long prompts. The engine itself rejects neither. "
        "prefill and decode need kv_transfer_address",
    )
    peer_tls: PeerTls | None = option(
        None,
        "certificate for exchanging KV cache blocks and for nodes; None: in plaintext",
        internal=True,
    )
    compile_cache: str | None = option(
        None,
        "folder that keeps compiled GPU kernels, where later starts find them. Engines may share it at the same path "
        "(default: Triton's cache, which is in the home directory)",
        metavar="FOLDER",
    )
    async_scheduling: bool = option(True, "schedule the next step while the current one runs")
    enforce_eager: bool = option(False, "on a GPU: launch kernels one by one instead of replaying CUDA graphs")
    batch_invariant: bool = option(
        False,
        "make a request's tokens independent of the other requests in its batch, to the bit (always so on a CPU). "
        "Slower; on a GPU not for quantized weights, mixtures of experts, latent attention, or tensor parallelism",
    )
    scheduling_policy: SchedulingPolicy = option("fcfs", "order of waiting requests: by arrival, or by priority first")
    max_logprobs: int = option(
        20,
        "maximum log probabilities that a request may ask for per position; -1: the whole vocabulary. A step computes "
        "as many of each token that has any, which takes memory",
        minimum=-1,
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        'speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, '
        '"prompt_lookup_min": 1} (default: none)',
        metavar="JSON",
        parse=SpeculativeConfig.from_json,
    )

    enable_lora: bool = option(False, "accept LoRA adapters, which requests name")
    max_loras: int = option(4, "maximum different adapters in one step; each takes device memory", minimum=1)
    max_lora_rank: int = option(16, "maximum rank of adapters", minimum=1, maximum=256)
    max_cpu_loras: int | None = option(
        None, "maximum loaded adapters, which are kept in host memory (default: 4 times max_loras)", minimum=1
    )
    lora_modules: tuple[LoraModule, ...] = option(
        (),
        'adapter to load at the start, as NAME=PATH or JSON {"name": …, "path": …}; repeat for several',
        metavar="NAME=PATH",
        parse=LoraModule.parse,
    )

    enable_prompt_embeds: bool = option(False, "accept embeddings in the place of a prompt's tokens")
    language_model_only: bool = option(False, "load no image encoder, and reject requests with images")
    encoder_cache_size: int | None = option(
        None,
        "maximum tokens of encoded images on the device; larger images are rejected (default: max_num_batched_tokens, "
        "or the model's largest image if that has more)",
        parse=parse_count,
        minimum=1,
    )
    mm_processor_cache_gb: float = option(
        1.0,
        "host memory in GiB for the pixels of recent images, which requests may name by their hashes; 0: none are kept",
        minimum=0,
    )

    device: Device = option("auto", "device to compute on (auto: a GPU if there is one)")
    tensor_parallel_size: int = option(1, "number of tensor-parallel ranks", minimum=1)
    pipeline_parallel_size: int = option(
        1,
        "number of pipeline stages, each of tensor_parallel_size ranks. The layers are divided among them, and as many "
        "steps are in flight",
        minimum=1,
    )
    decode_context_parallel_size: int = option(
        1,
        "tensor-parallel ranks among which the KV cache of latent attention is divided by its tokens, so that it has "
        "room for as many times the tokens: 1 (each rank has all) or tensor_parallel_size",
        minimum=1,
    )
    nnodes: int = option(
        1, "number of machines or pods that share the ranks of this engine; each runs as many ranks", minimum=1
    )
    node_rank: int = option(
        0,
        "number of this node, from 0. Node 0 is the engine; the others run their ranks, with node 0's configuration",
        minimum=0,
    )
    master_addr: str | None = option(None, "address of node 0 for the other nodes. Needed if nnodes is above 1")
    master_port: int = option(
        29501, "port on which node 0 accepts the ranks of the other nodes", minimum=1, maximum=65535
    )
    enable_expert_parallel: bool = option(
        False,
        "tensor-parallel ranks hold whole experts of a mixture, in place of a share of the width of each (always so "
        "where the width cannot be divided)",
    )
    disable_custom_all_reduce: bool = option(
        False,
        "add the parts of all ranks with NCCL alone; otherwise those of few bytes are added through memory that the "
        "GPUs of a machine read from each other, if they can",
    )
    worker_sockets: tuple[str, ...] = option(
        (),
        "Unix socket of a worker that runs in a process of its own, such as a sidecar; repeat for each rank from 1 "
        "(default: the engine spawns its workers)",
        flag="--worker-socket",
        metavar="PATH",
    )

    __repr__ = masked_repr

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_model_len not in (None, FITTING_LENGTH) and self.max_model_len < 2:  # a prompt and an output token
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if not all(self.served_model_name):
            raise ValueError("served_model_name must not be empty")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")
        if self.worker_sockets and len(self.worker_sockets) != self.num_ranks - 1:
            raise ValueError(
                f"worker_sockets must name one for each rank from 1, {self.num_ranks - 1} of {self.num_ranks} ranks, "
                f"got {len(self.worker_sockets)}"
            )

        check_sampling_defaults(self.override_generation_config or {})
        if self.block_size & (self.block_size - 1):  # the distances of checkpoints are powers of two
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        self._check_pipeline()
        self._check_decode_context_parallel()
        self._check_nodes()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras must be at least max_loras ({self.max_loras}), got {self.max_cpu_loras}")
        if self.lora_modules and not self.enable_lora:
            raise ValueError("lora_modules needs enable_lora")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ValueError("kv_offloading_size needs enable_prefix_caching")
        if self.kv_transfer_address is not None and not self.kv_offloading_size:
            raise ValueError("kv_transfer_address needs kv_offloading_size: blocks are exchanged in host memory")
        if self.kv_offloading_path is not None and not self.kv_offloading_size:
            raise ValueError("kv_offloading_path needs kv_offloading_size, the size of its files")
        if self.kv_disk_path is not None and not self.kv_offloading_size:
            raise ValueError("kv_disk_path needs kv_offloading_size: blocks are read into host memory")
        if (self.kv_disk_path is None) != (not self.kv_disk_size):
            raise ValueError("kv_disk_path and kv_disk_size must be set together")
        if self.kv_transfer_address is not None and not _ADDRESS.fullmatch(self.kv_transfer_address):
            raise ValueError(f"kv_transfer_address must be HOST:PORT, got {self.kv_transfer_address!r}")
        for source in self.kv_transfer_sources:
            if not _is_network(source) and not _HOST_NAME.fullmatch(source):
                raise ValueError(
                    f"kv_transfer_sources must be networks, addresses or host names without a port, got {source!r}"
                )
        if self.role != "both" and self.kv_transfer_address is None:
            raise ValueError(f"role {self.role} needs kv_transfer_address, over which prompts' blocks are exchanged")

    def _check_pipeline(self) -> None:
        if self.pipeline_parallel_size == 1:
            return
        for field in ("speculative_config", "kv_transfer_address", "kv_offloading_path", "kv_disk_path"):
            if getattr(self, field) is not None:
                raise ValueError(f"{field} cannot be used with pipeline_parallel_size above 1")

    def _check_decode_context_parallel(self) -> None:
        size = self.decode_context_parallel_size
        if size not in (1, self.tensor_parallel_size):
            raise ValueError(
                f"decode_context_parallel_size must be 1 or tensor_parallel_size ({self.tensor_parallel_size}), "
                f"got {size}"
            )
        if self.block_size % size:
            raise ValueError(
                f"block_size ({self.block_size}) must be a multiple of decode_context_parallel_size ({size}), because "
                "each rank has an equal part of a block"
            )

    def _check_nodes(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank must be below nnodes ({self.nnodes}), got {self.node_rank}")
        if self.nnodes == 1:
            return
        if self.master_addr is None:
            raise ValueError("nnodes above 1 needs master_addr, the address of node 0")
        if self.num_ranks % self.nnodes:
            raise ValueError(f"the number of ranks ({self.num_ranks}) cannot be divided by nnodes ({self.nnodes})")
        if self.worker_sockets:
            raise ValueError("worker_sockets cannot be used with nnodes above 1: each node spawns its ranks")
        for field in ("kv_transfer_address", "kv_offloading_path", "kv_disk_path"):
            if getattr(self, field) is not None:
                raise ValueError(f"{field} cannot be used with nnodes above 1, only kv_offloading_size")

    @property
    def downloads(self) -> Downloads:
        return Downloads(self.download_dir, self.download_cache_size)

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine, on all nodes. Ranks of one pipeline stage have numbers that follow each other."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node: node n has those from n * `ranks_per_node`."""
        return self.num_ranks // self.nnodes

    @property
    def ranks_here(self) -> int:
        """Ranks that share a machine or container, its cores and its memory. Workers at `worker_sockets` have a
        container of their own."""
        return 1 if self.worker_sockets else self.ranks_per_node

    @property
    def max_loaded_loras(self) -> int:
        """`max_cpu_loras`, or its default."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def num_encoder_cache_tokens(self, images: ImageInput | None) -> int:
        """`encoder_cache_size`, or its default, of a model that reads `images`; 0 if the engine reads none."""
        if images is None or self.language_model_only:
            return 0
        return self.encoder_cache_size or max(self.max_num_batched_tokens, images.max_tokens)

    @property
    def has_movers(self) -> bool:
        """Whether each rank has a mover, which exchanges its host memory with engines, disk and earlier starts."""
        paths = (self.kv_transfer_address, self.kv_offloading_path, self.kv_disk_path)
        return any(path is not None for path in paths)

    @property
    def model_name(self) -> str:
        """The model's first name in the API."""
        if self.served_model_name:
            return self.served_model_name[0]
        return "proa-builtin" if self.model == "builtin" else self.model

    @property
    def model_aliases(self) -> tuple[str, ...]:
        """The model's other names in the API."""
        return tuple(dict.fromkeys(name for name in self.served_model_name if name != self.model_name))

    def num_top_logprobs(self, vocab_size: int) -> int:
        """`max_logprobs` for a vocabulary."""
        return vocab_size if self.max_logprobs < 0 else min(self.max_logprobs, vocab_size)

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum draft tokens of a request in a step; zero without speculative decoding."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens
