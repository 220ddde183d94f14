"""EngineConfig: the configuration of an engine. Field names are vLLM's where vLLM has the field.

Each field, and each field of a group (`option_groups`), is a flag of `proa-engine serve` and an argument of the offline
`LLM`. A group checks its own fields; here is checked what concerns several.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from proa.contract import AudioInput, ImageInput
from proa.options import REQUIRED, check_options, from_flat, masked_repr, option, parse_count
from proa_engine.json_configs import PoolerConfig, SpeculativeConfig, check_sampling_defaults, json_object
from proa_engine.option_groups import Downloads, ImageOptions, KvTiers, LoraOptions, Parallel

LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "float32", "float", "float16", "half", "bfloat16"]
SchedulingPolicy = Literal["fcfs", "priority"]
KvCacheDtype = Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3"]
Runner = Literal["auto", "generate", "pooling"]
Device = Literal["auto", "cpu", "cuda"]
FITTING_LENGTH = -1
"""The `max_model_len` of vLLM's `auto`: the model's context length, or what the KV cache has room for if that is
less."""


def _parse_length(text: str) -> int:
    return FITTING_LENGTH if text.strip().lower() == "auto" else parse_count(text)


@dataclass(frozen=True, slots=True)
class PeerTls:
    """Paths of the PEM files with which engines, and the nodes of an engine, know each other."""

    certificate_file: str
    key_file: str
    authority_file: str


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
        '"prompt_lookup_min": 1}, or with a drafter {"method": "eagle3", "model": FOLDER, "num_speculative_tokens": 3} '
        "(default: none)",
        metavar="JSON",
        parse=SpeculativeConfig.from_json,
    )

    enable_prompt_embeds: bool = option(False, "accept embeddings in the place of a prompt's tokens")

    device: Device = option("auto", "device to compute on (auto: a GPU if there is one)")
    downloads: Downloads = option(Downloads(), "downloads")
    kv_tiers: KvTiers = option(KvTiers(), "KV cache blocks in host memory, on a disk and of other engines")
    parallel: Parallel = option(Parallel(), "ranks of the engine")
    lora: LoraOptions = option(LoraOptions(), "LoRA adapters")
    images: ImageOptions = option(ImageOptions(), "images in prompts")

    __repr__ = masked_repr

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Build the configuration from options by name, whatever their group. Raises `TypeError` for a name that is
        not an option, and `ValueError`."""
        return from_flat(cls, options)

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_model_len not in (None, FITTING_LENGTH) and self.max_model_len < 2:  # a prompt and an output token
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if not all(self.served_model_name):
            raise ValueError("served_model_name must not be empty")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")

        check_sampling_defaults(self.override_generation_config or {})
        if self.block_size & (self.block_size - 1):  # the distances of checkpoints are powers of two
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.kv_tiers.kv_offloading_size and not self.enable_prefix_caching:
            raise ValueError("kv_offloading_size needs enable_prefix_caching")
        self._check_parallel()

    def _check_parallel(self) -> None:
        """Raise `ValueError` for an option that the ranks' division leaves no way to use."""
        parallel, of_movers = self.parallel, self.kv_tiers.used_by_movers
        if self.block_size % parallel.decode_context_parallel_size:
            raise ValueError(
                f"block_size ({self.block_size}) must be a multiple of decode_context_parallel_size "
                f"({parallel.decode_context_parallel_size}), because each rank has an equal part of a block"
            )
        if parallel.pipeline_parallel_size > 1:
            drafts = () if self.speculative_config is None else ("speculative_config",)
            if unusable := (*drafts, *of_movers):
                raise ValueError(f"{unusable[0]} cannot be used with pipeline_parallel_size above 1")
        if self.drafter and self.drafter.draft_tensor_parallel_size not in (None, parallel.tensor_parallel_size):
            raise ValueError(
                f"draft_tensor_parallel_size must be tensor_parallel_size ({parallel.tensor_parallel_size}): all ranks "
                "have a share of the drafter"
            )
        if self.drafter and parallel.decode_context_parallel_size > 1:
            raise ValueError("decode_context_parallel_size must be 1 with a drafter, whose keys are not divided")
        if parallel.nnodes > 1 and of_movers:
            raise ValueError(f"{of_movers[0]} cannot be used with nnodes above 1, only kv_offloading_size")

    def num_encoder_cache_tokens(self, *inputs: ImageInput | AudioInput | None) -> int:
        """`encoder_cache_size`, or its default, of a model that reads `inputs`; 0 if the engine reads none."""
        largest = max((each.max_tokens for each in inputs if each), default=0)
        if not largest or self.images.language_model_only:
            return 0
        return self.images.encoder_cache_size or max(self.max_num_batched_tokens, largest)

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
    def drafter(self) -> SpeculativeConfig | None:
        """`speculative_config` if draft tokens are those of layers that read the model's hidden states."""
        return self.speculative_config if self.speculative_config and self.speculative_config.reads_states else None

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum draft tokens of a request in a step; zero without speculative decoding."""
        return 0 if self.speculative_config is None else self.speculative_config.max_drafts
