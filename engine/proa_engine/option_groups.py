"""The groups of `EngineConfig`'s options that have limits of their own, each checked where it stands.

A field has the same name in its group as its flag has and as the argument of `LLM`, so that messages name what users
set.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Literal

from proa.lora_module import LoraModule
from proa.options import check_options, option, parse_count

Role = Literal["both", "prefill", "decode"]
LOOPBACK = ("127.0.0.0/8", "::1", "localhost")
_ADDRESS = re.compile(r".*:\d{1,5}")
_HOST_NAME = re.compile(r"\w([\w.-]*\w)?\.?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloads:
    """Where downloads are kept, and how many bytes of those from object stores."""

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

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTiers:
    """KV cache blocks outside the device: in host memory, on a disk, and of other engines. The two others are read into
    host memory, which they need."""

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

    def __post_init__(self) -> None:
        check_options(self)
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

    @property
    def used_by_movers(self) -> tuple[str, ...]:
        """The names of the options in use for which each rank has a mover, which exchanges its host memory with
        engines, disk and earlier starts."""
        names = ("kv_transfer_address", "kv_offloading_path", "kv_disk_path")
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def has_movers(self) -> bool:
        return bool(self.used_by_movers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The engine's ranks, how they divide the model, and the nodes that run them."""

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

    def __post_init__(self) -> None:
        check_options(self)
        if self.worker_sockets and len(self.worker_sockets) != self.num_ranks - 1:
            raise ValueError(
                f"worker_sockets must name one for each rank from 1, {self.num_ranks - 1} of {self.num_ranks} ranks, "
                f"got {len(self.worker_sockets)}"
            )
        if self.decode_context_parallel_size not in (1, self.tensor_parallel_size):
            raise ValueError(
                f"decode_context_parallel_size must be 1 or tensor_parallel_size ({self.tensor_parallel_size}), "
                f"got {self.decode_context_parallel_size}"
            )
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank must be below nnodes ({self.nnodes}), got {self.node_rank}")
        if self.nnodes > 1:
            self._check_nodes()

    def _check_nodes(self) -> None:
        if self.master_addr is None:
            raise ValueError("nnodes above 1 needs master_addr, the address of node 0")
        if self.num_ranks % self.nnodes:
            raise ValueError(f"the number of ranks ({self.num_ranks}) cannot be divided by nnodes ({self.nnodes})")
        if self.worker_sockets:
            raise ValueError("worker_sockets cannot be used with nnodes above 1: each node spawns its ranks")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """LoRA adapters, and how many there may be on the device and in host memory."""

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

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras must be at least max_loras ({self.max_loras}), got {self.max_cpu_loras}")
        if self.lora_modules and not self.enable_lora:
            raise ValueError("lora_modules needs enable_lora")

    @property
    def max_loaded_loras(self) -> int:
        """`max_cpu_loras`, or its default."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Images in prompts: whether they are read, and the memory for pixels and encodings."""

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
        "host memory in GiB for the pixels of recent images and the samples of recent audios, which requests may name "
        "by their hashes; 0: none are kept",
        minimum=0,
    )

    def __post_init__(self) -> None:
        check_options(self)


def _is_network(text: str) -> bool:
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True
