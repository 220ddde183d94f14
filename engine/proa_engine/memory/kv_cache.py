"""The sizes of the KV cache, weights and images, and what fits into memory: arithmetic on byte counts, and errors that
name the option to change."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from math import isqrt

from proa.contract import ImageInput
from proa_engine.config import EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.memory.cache_plan import CachePlan
from proa_engine.memory.host import HostMemory
from proa_engine.memory.requirements import gib
from proa_engine.models.audio_config import AudioConfig, placed
from proa_engine.models.config import ModelConfig
from proa_engine.models.image_config import ImageConfig

# Share of the machine's available memory to use without a container limit, because other programs need some too.
_SHARE_OF_MACHINE = 0.5


# A state of more bytes than so many tokens in blocks is large.
_TOKENS_OF_LARGE_STATE = 4096
# Number of blocks whose host memory, some tens of MB, needs no limit.
_SMALL_NUM_BLOCKS = 1 << 17
# Bytes copied between device and host in one step: on CUDA beside the step, on a CPU before it.
_COPIED_STEP_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
# Least number of blocks to load. A load takes at least one step, in which fewer blocks could be computed.
_MIN_LOAD_BLOCKS = 4
# A junction, where a prompt diverges from cached ones, gets a checkpoint if that saves at least this many tokens, or
# half of the interval: with checkpoints that are as small as LFM2's, prompts would else lose what is behind the last
# one of the interval.
_MIN_JUNCTION = 256


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """How the memory of the KV cache is divided, the same on every rank."""

    num_blocks: int
    num_state_slots: int  # 0: no layer has a state
    max_num_seqs: int  # at most as configured
    num_host_pages: int = 0  # 0: there is no host tier
    num_host_states: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSizes:
    """Memory that one rank uses, in bytes, and the KV cache that fits beside it."""

    cache: CacheSizes
    block_bytes: int  # of one block on this rank
    weight_bytes: int
    tables: tuple[int, ...]  # of each layer with blocks: its block table
    state_bytes: int = 0  # of one state on this rank


def check_ranks(config: EngineConfig, rank_sizes: Sequence[WorkerSizes]) -> None:
    """Raise ValueError unless the ranks, which may hold unequal shares of the KV heads, can have one KV cache.

    Ranks that divide the same layers must have the same layers in each block table. These may differ where layers have
    different numbers of KV heads. Host memory is adopted in ranges of pages, whose number depends on the pages' size.
    """
    size = config.parallel.tensor_parallel_size
    for start in range(0, len(rank_sizes), size):
        if len({sizes.tables for sizes in rank_sizes[start : start + size]}) > 1:
            raise ValueError(
                "the KV caches of layers cannot be packed into equal blocks on all ranks, because their KV heads are "
                f"not divisible by tensor_parallel_size ({size}): use a size that divides them"
            )
    if config.kv_tiers.kv_offloading_path is not None and len({sizes.block_bytes for sizes in rank_sizes}) > 1:
        raise ValueError(
            "kv_offloading_path is set, but the ranks have KV caches of different sizes: use a tensor_parallel_size "
            "that divides the KV heads, or unset it"
        )


def smallest(sizes: Iterable[CacheSizes]) -> CacheSizes:
    """Return the largest sizes that fit on every rank, given each rank's."""
    columns = zip(*map(astuple, sizes), strict=True)
    return CacheSizes(*map(min, columns))


def cache_groups(config: EngineConfig, plan: CachePlan, sizes: CacheSizes) -> CacheGroups:
    """Return the KV cache of these sizes, in the form that the core divides among requests."""
    step_of_drafts = 2 * (1 + config.num_speculative_tokens)  # two steps in flight
    return CacheGroups(
        num_blocks=sizes.num_blocks,
        block_size=plan.block_size,
        windows=plan.windows,
        num_state_slots=sizes.num_state_slots,
        cross_tokens=plan.cross_tokens,
        checkpoint_interval=plan.checkpoint_interval,
        min_junction=min(_MIN_JUNCTION, plan.checkpoint_interval // 2),
        max_step_tokens=max(config.max_num_batched_tokens, step_of_drafts),
    )


def num_kept_tokens(config: EngineConfig) -> int:
    """Return the number of a request's tokens of which layers with states keep inputs: those of a step with drafts."""
    return 1 + config.num_speculative_tokens if config.num_speculative_tokens else 0


def share_of_cached_states(plan: CachePlan) -> float:
    """Return the share of the memory beside the requests' own states that is for states of cached prefixes. The rest is
    for blocks. With large states conversations that can be continued are limited by states, not by blocks."""
    is_large = plan.state_bytes * plan.block_size > _TOKENS_OF_LARGE_STATE * plan.block_bytes
    return 0.5 if is_large else 0.25


def divide(num_bytes: int, plan: CachePlan, max_num_seqs: int, num_kept: int = 0) -> CacheSizes:
    """Divide memory between blocks and states.

    A request needs a state and the inputs of `num_kept` tokens, and one more state is needed to write while another is
    read. If those of `max_num_seqs` requests would take more than half of the memory, fewer requests run. Raises
    ValueError if not even one could.
    """
    if not plan.state_bytes:
        return CacheSizes(num_bytes // plan.block_bytes, 0, max_num_seqs)
    request_bytes = plan.state_bytes + num_kept * plan.input_bytes
    max_num_seqs = min(max_num_seqs, (num_bytes - 2 * plan.state_bytes) // (2 * request_bytes))
    if max_num_seqs < 1:
        raise ValueError(
            f"the KV cache has {gib(max(num_bytes, 0))} on this rank, but the state of one request takes "
            f"{gib(request_bytes)}: raise kv_cache_memory_bytes (gpu_memory_utilization), or give the engine more "
            "memory"
        )
    left = num_bytes - max_num_seqs * request_bytes - plan.state_bytes
    num_cached = int(left * share_of_cached_states(plan)) // plan.state_bytes
    num_blocks = (left - num_cached * plan.state_bytes) // plan.block_bytes
    return CacheSizes(num_blocks, max_num_seqs + 1 + num_cached, max_num_seqs)


def with_blocks(num_blocks: int, plan: CachePlan, max_num_seqs: int) -> CacheSizes:
    """Return the sizes with this number of blocks, with states in the same proportion as `divide` has."""
    if not plan.state_bytes:
        return CacheSizes(num_blocks, 0, max_num_seqs)
    share = share_of_cached_states(plan)
    num_cached = int(num_blocks * plan.block_bytes * share / (1 - share)) // plan.state_bytes
    return CacheSizes(num_blocks, max_num_seqs + 1 + num_cached, max_num_seqs)


def with_host(sizes: CacheSizes, config: EngineConfig, plan: CachePlan) -> CacheSizes:
    """Return the sizes with the host tier added, if there is one. Raises ValueError if it would hold nothing."""
    if not config.kv_tiers.kv_offloading_size:
        return sizes
    if not plan.block_bytes:
        raise ValueError("kv_offloading_size is set, but the model keeps no KV cache")
    num_bytes = host_bytes(config)
    num_states = int(num_bytes * share_of_cached_states(plan)) // plan.state_bytes if plan.state_bytes else 0
    num_pages = (num_bytes - num_states * plan.state_bytes) // plan.block_bytes
    if not num_pages or (plan.state_bytes and not num_states):
        smallest = plan.block_bytes if not plan.state_bytes else max(4 * plan.state_bytes, 2 * plan.block_bytes)
        raise ValueError(
            f"kv_offloading_size is {config.kv_tiers.kv_offloading_size:g} GiB, {gib(num_bytes)} on this rank, but "
            f"what it must hold takes {gib(smallest)}: raise it"
        )
    return replace(sizes, num_host_pages=num_pages, num_host_states=num_states)


def host_bytes(config: EngineConfig) -> int:
    """Return the bytes of the host tier on each rank."""
    return int(config.kv_tiers.kv_offloading_size * 2**30) // config.parallel.num_ranks


def host_tier(
    config: EngineConfig, rank_sizes: Sequence[WorkerSizes], device_type: str, load_rate: float
) -> HostTierConfig | None:
    """Return the core's configuration of the host tier of all ranks. `load_rate`: bytes a second on rank 0.

    Pages are as large as those of the rank with the largest: pipeline stages may have none at all.
    """
    sizes = smallest(each.cache for each in rank_sizes)
    if not sizes.num_host_pages:
        return None
    page_bytes = max(each.block_bytes for each in rank_sizes)
    is_measured = rank_sizes[0].block_bytes == page_bytes
    return HostTierConfig(
        num_pages=sizes.num_host_pages,
        num_states=sizes.num_host_states,
        max_step_pages=max(_COPIED_STEP_BYTES[device_type] // page_bytes, 1),
        state_pages=-(-max(each.state_bytes for each in rank_sizes) // page_bytes),
        min_load_tokens=_MIN_LOAD_BLOCKS * config.block_size,
        page_bytes=page_bytes,
        load_bytes_per_second=load_rate * config.parallel.num_ranks if is_measured else 0.0,
        adopts=config.kv_tiers.kv_offloading_path is not None,
    )


def configured_sizes(config: EngineConfig, plan: CachePlan) -> CacheSizes | None:
    """Return the sizes that `config` sets, by a number of blocks or in bytes; None if it sets neither.

    A model without caches gets as many blocks, which take no memory, as two steps of whole prompts can fill.
    """
    if not plan.block_bytes and not plan.state_bytes:
        blocks_of_step = -(-config.max_num_batched_tokens // plan.block_size) + config.max_num_seqs
        return CacheSizes(2 * blocks_of_step, 0, config.max_num_seqs)
    if config.num_gpu_blocks_override is not None:
        return with_blocks(config.num_gpu_blocks_override, plan, config.max_num_seqs)
    if config.kv_cache_memory_bytes is not None:
        return divide(config.kv_cache_memory_bytes, plan, config.max_num_seqs, num_kept_tokens(config))
    return None


def cpu_sizes(num_bytes: int, config: EngineConfig, plan: CachePlan, max_model_len: int) -> CacheSizes:
    """Return the sizes for a CPU. They are at most what requests of `max_model_len` tokens in every slot can use."""
    sizes = divide(num_bytes, plan, config.max_num_seqs, num_kept_tokens(config))
    most = _blocks_of_all_slots(config, plan, sizes, max_model_len)
    return smallest((sizes, with_blocks(most, plan, config.max_num_seqs)))


def gpu_sizes(num_bytes: int, config: EngineConfig, plan: CachePlan, max_model_len: int) -> CacheSizes:
    """Return the sizes for a GPU: at most twice the blocks of `cpu_sizes`, because nothing else uses the memory and
    cached prefixes benefit.

    There is a limit because a block also takes host memory, and a tiny model would have millions of them.
    """
    sizes = divide(num_bytes, plan, config.max_num_seqs, num_kept_tokens(config))
    most = max(2 * _blocks_of_all_slots(config, plan, sizes, max_model_len), _SMALL_NUM_BLOCKS)
    return smallest((sizes, with_blocks(most, plan, config.max_num_seqs)))


def _blocks_of_all_slots(config: EngineConfig, plan: CachePlan, sizes: CacheSizes, max_model_len: int) -> int:
    return cache_groups(config, plan, sizes).blocks_of(max_model_len) * config.max_num_seqs


def cpu_budget(memory: HostMemory, *, utilization: float, ranks_here: int, workspace: int) -> int:
    """Return the bytes for one rank's KV cache on a CPU, where `ranks_here` ranks share the container or machine.

    `workspace` is the peak memory of a step, in bytes. Negative if the other uses exceed the memory.
    """
    if memory.limit is None:
        return int(memory.available * _SHARE_OF_MACHINE) // ranks_here - workspace
    share = int(memory.limit * utilization) // ranks_here - memory.process
    return min(share, memory.available // ranks_here) - workspace


def cpu_workspace(config: EngineConfig, model: ModelConfig, dtype_bytes: int) -> int:
    """Estimate the peak bytes of a step of the full token budget: activations per token, copies of the logits per
    row."""
    inner_size = max(layer.mlp.inner_size for layer in model.layers)
    per_token = (6 * model.hidden_size + 3 * inner_size) * dtype_bytes
    per_row = 6 * model.vocab_size * 4
    max_rows = config.max_num_seqs * (1 + config.num_speculative_tokens)
    return config.max_num_batched_tokens * per_token + max_rows * per_row


def num_parameters(model: ModelConfig) -> int:
    """Estimate the number of parameters of a pipeline stage: embeddings and matrices, without norms and biases."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    layers = sum(layer.num_parameters(model.hidden_size) for layer in model.own_layers)
    return layers + (embeddings if model.stage.is_first else 0)


def num_multiplied(model: ModelConfig) -> int:
    """Estimate the number of parameters by which a token is multiplied in the layers of a pipeline stage."""
    hidden_size = model.hidden_size
    return sum(
        layer.num_parameters(hidden_size)
        - layer.mlp.num_parameters(hidden_size)
        + layer.mlp.num_multiplied(hidden_size)
        for layer in model.own_layers
    )


def check_room(groups: CacheGroups, block_bytes: int, max_model_len: int, *, reads_images: bool = False) -> None:
    """Raise `ValueError` unless one request of `max_model_len` tokens fits."""
    num_blocks, needed = max(groups.num_blocks, 0), groups.blocks_of(max_model_len)
    if num_blocks >= needed:
        return
    longest = groups.capacity
    shorter = f"lower max_model_len to at most {longest}, or set it to auto" if longest else "take a smaller model"
    if reads_images:
        shorter += ", take less memory for images (encoder_cache_size, language_model_only)"
    raise ValueError(
        f"the KV cache has room for {num_blocks} blocks, but one request of max_model_len {max_model_len} tokens needs "
        f"{needed} ({gib(needed * block_bytes)} on this rank): {shorter}, raise kv_cache_memory_bytes "
        "(num_gpu_blocks_override, gpu_memory_utilization), or give the engine more memory"
    )


def weight_bytes(model: ModelConfig, dtype_bytes: int, num_ranks: int) -> int:
    """Estimate the bytes of the weights of the rank with the most. Every rank has the whole encoders of images and
    audios."""
    num_shared = sum(each.num_parameters for each in (model.images, model.audios) if each)
    num_shared += sum(layer.num_copied(model.hidden_size, num_ranks) for layer in model.own_layers)
    num_divided, split = num_parameters(model), model.expert_split(num_ranks)
    if split is not None:
        routed = [layer.routed_experts for layer in model.own_layers]
        num_routed = sum(sizes.num_parameters(model.hidden_size) for sizes in routed if sizes is not None)
        num_divided -= num_routed
        num_shared += int(num_routed * split.largest_share)
    return (num_divided // num_ranks + num_shared) * dtype_bytes


def most_image_tokens(config: EngineConfig, images: ImageInput, max_model_len: int) -> int:
    """Return the number of tokens of the largest image that is accepted."""
    return min(images.max_tokens, config.num_encoder_cache_tokens(images), max_model_len)


def image_of(image_input: ImageInput, num_tokens: int) -> tuple[int, int]:
    """Return height and width in pixels of a nearly square image of about `num_tokens` tokens, or of the most tokens
    that are allowed."""
    if image_input.side:
        return image_input.side, image_input.side
    least = -(-image_input.min_pixels // image_input.unit**2)
    num_tokens = min(max(num_tokens, least), image_input.max_tokens)
    rows = isqrt(num_tokens)
    columns = (num_tokens + 1) // rows - 1 if image_input.row_end else num_tokens // rows
    return rows * image_input.unit, columns * image_input.unit


def encoder_cache_bytes(
    config: EngineConfig, images: ImageConfig | None, dtype_bytes: int, audios: AudioConfig | None = None
) -> int:
    """Return the bytes of the encoded images and audios that are kept, on each rank."""
    kinds = placed(images, audios)
    num_tokens = config.num_encoder_cache_tokens(*(each.input for each in kinds))
    return num_tokens * max((each.embedding_width for each in kinds), default=0) * dtype_bytes


def cpu_audio_bytes(config: EngineConfig, audios: AudioConfig | None, dtype_bytes: int) -> int:
    """Estimate the bytes of the encoded audios that are kept, and of encoding the longest one."""
    most = audios.input.max_tokens * audios.token_values * dtype_bytes if audios else 0
    return most + encoder_cache_bytes(config, None, dtype_bytes, audios)


def cpu_encoder_bytes(config: EngineConfig, images: ImageConfig | None, max_model_len: int, dtype_bytes: int) -> int:
    """Estimate the bytes of the encoded images that are kept, and of encoding the largest one."""
    if images is None:
        return 0
    most = most_image_tokens(config, images.input, max_model_len)
    return encoder_cache_bytes(config, images, dtype_bytes) + most * images.token_values * dtype_bytes
