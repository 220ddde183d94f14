"""Build an engine from its configuration: load the model into an executor, and make the core that steps it.

The server and the offline `LLMEngine` both start here. Torch is imported only when a model is loaded.
"""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from proa.blocks import checkpoint_positions, hash_block, root_hash
from proa.tokenizer_files import load_tokenizer
from proa_engine.config import EngineConfig
from proa_engine.core.admission.validation import LengthLimits, ModelLimits
from proa_engine.core.encoder_cache import EncoderCache
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.executor import Executor
from proa_engine.core.kv.encoder_blocks import EncoderBlocks
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.lora_store import LoraError, LoraStore
from proa_engine.core.loras import Loras
from proa_engine.core.media import CrossAttention, Media, MediaStore
from proa_engine.core.operations import LoadLora
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.executor.started import StartedRanks
from proa_engine.grammar import SERVING_LIMITS, GrammarTokenizer, LLGuidanceGrammars, QueueLimits, make_tokenizer
from proa_engine.models.audio_config import AudioConfig, placed
from proa_engine.models.drafters.draft_number import with_draft_number
from proa_engine.models.image_config import ImageConfig
from proa_engine.preflight import check_start
from proa_engine.sources.folders import read_tokenizer_files
from proa_engine.sources.resolve import resolve_model_of, resolve_tokenizer


class LoadedExecutor(Executor, Protocol):
    """An executor that can run steps: its model is loaded and warmed up."""

    @property
    def started(self) -> StartedRanks: ...

    @property
    def failure(self) -> str | None:
        """Why the executor cannot run steps any more; None while it can."""
        ...

    def fail(self, reason: str) -> None:
        """Stop running steps: everything that waits for one raises ExecutorFailed. Callable from any thread."""
        ...

    def make_host_buffer(self, num_bytes: int) -> memoryview:
        """Writable memory for masks, which the device reads without blocking the host; lives as long as its views."""
        ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine in this process. `tokenizer_folder` holds the tokenizer's files; None: no tokenizer."""

    config: EngineConfig
    executor: LoadedExecutor
    core: EngineCore
    limits: ModelLimits
    tokenizer_folder: Path | None
    grammars: LLGuidanceGrammars | None = None

    def shutdown(self) -> None:
        """End the threads and processes of the engine, which runs no step."""
        if self.grammars is not None:
            self.grammars.close()
        self.executor.shutdown()


def untraced(executor: Executor) -> Executor:
    return executor


def load_engine(
    config: EngineConfig,
    report: Callable[[str], None],
    trace_steps: Callable[[Executor], Executor] = untraced,
    grammar_queue: QueueLimits = SERVING_LIMITS,
) -> EngineParts:
    """Load the model and build the engine.

    `report` is called with progress messages. `trace_steps` wraps the executor that the core steps. `grammar_queue`
    limits the requests whose grammars wait to be compiled. Raises `ValueError`, with a sentence for the user, for a
    model or configuration that cannot be loaded.

    Objects alive afterwards, which live as long as the engine, are excluded from garbage collection (`gc.freeze`).
    """
    check_start(config)
    config = with_draft_number(config)
    from proa_engine.executor import prepare_executor
    from proa_engine.memory.host import available_cores

    start_executor = prepare_executor(config)  # imports what both threads use
    with ThreadPoolExecutor(1, thread_name_prefix="proa-tokenizer") as threads:
        tokenizer_loading = threads.submit(_load_tokenizer, config)  # beside the weights
        executor = start_executor(report)
    started = executor.started
    folder, tokenizer = tokenizer_loading.result()
    grammars = None
    if tokenizer is not None:
        grammars = LLGuidanceGrammars(
            tokenizer,
            started.eos_token_ids,
            max_samples=started.max_num_seqs * (1 + config.num_speculative_tokens),
            make_buffer=executor.make_host_buffer,
            num_threads=min(max(available_cores() // 2, 1), 8),
            limits=grammar_queue,
            max_steps_in_flight=max(2, config.parallel.pipeline_parallel_size),
        )
    parts = assemble_engine(config, executor, folder, trace_steps, grammars, make_loras(config, executor))
    gc.collect()
    gc.freeze()
    return parts


def assemble_engine(
    config: EngineConfig,
    executor: LoadedExecutor,
    tokenizer_folder: Path | None,
    trace_steps: Callable[[Executor], Executor] = untraced,
    grammars: LLGuidanceGrammars | None = None,
    loras: Loras | None = None,
) -> EngineParts:
    """Build an engine on an executor that has loaded its model. Without `grammars` or `loras` it refuses them."""
    started = executor.started
    manager = KVCacheManager(
        started.cache_groups,
        hash_block=hash_block if config.enable_prefix_caching and not started.model_config.is_encoder else None,
        root_hash=root_hash(config.model, config.revision or ""),
        checkpoint_positions=checkpoint_positions,
        host=started.host_tier,
        mover=started.mover,
        has_disk=config.kv_tiers.kv_disk_path is not None,
        has_sources=config.kv_tiers.kv_transfer_address is not None,
    )
    images = None if config.images.language_model_only else started.model_config.images
    scheduler = Scheduler(
        scheduler_config(config, started),
        manager,
        grammars=grammars,
        loras=loras,
        media=make_media(config, images, started.model_config.audios, manager.encoder_blocks),
    )
    core = EngineCore(scheduler, trace_steps(executor))
    if started.mover is not None:
        started.mover.listen(core.take_from_mover)
    model = started.model_config
    limits = ModelLimits(
        vocab_size=model.vocab_size,
        lengths=LengthLimits(started.max_model_len, started.cache_groups.capacity),
        max_logprobs=config.num_top_logprobs(model.vocab_size),
        grammars=grammars is not None,
        prefix_caching=config.enable_prefix_caching and not model.is_encoder,
        max_loras=0 if loras is None else config.lora.max_loras,
        pooling_tasks=frozenset(model.pooling.kinds),
        pooling_only=not model.has_lm_head,
        embedding_size=model.pooling.embedding_size,
        images=None if images is None else images.input,
        max_image_tokens=max_image_tokens(config, images, max_num_seqs=started.max_num_seqs),
        audios=model.audios.input if model.audios else None,
        max_audio_tokens=config.num_encoder_cache_tokens(*(each.input for each in placed(None, model.audios))),
        prompt_embeds_size=model.hidden_size if config.enable_prompt_embeds else 0,
    )
    return EngineParts(config, executor, core, limits, tokenizer_folder, grammars)


def make_loras(config: EngineConfig, store: LoraStore) -> Loras | None:
    """The engine's adapters, those of `lora_modules` loaded; None without enable_lora.

    Raises `ValueError` for an adapter that cannot be loaded.
    """
    if not config.lora.enable_lora:
        return None
    loras = Loras(store, max_loras=config.lora.max_loras, max_cpu_loras=config.lora.max_loaded_loras)
    for module in config.lora.lora_modules:
        try:
            loras.load_now(LoadLora(module.name, module.path))
        except LoraError as error:
            raise ValueError(f"lora_modules: {error}") from error
    return loras


def _load_tokenizer(config: EngineConfig) -> tuple[Path | None, GrammarTokenizer | None]:
    """The folder of the tokenizer's files, and the tokenizer of grammars. Raises ValueError for a file that gateways
    cannot read."""
    from proa_engine.models import read_config

    if config.skip_tokenizer_init:
        return None, None
    folder = resolve_tokenizer(config)
    files = read_tokenizer_files(folder)
    try:
        load_tokenizer(files)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    model_folder = resolve_model_of(config)
    model = read_config.of_engine(config, model_folder, language_model_only=True)
    eos_token_ids = model.eos_token_ids
    of_grammars = make_tokenizer(files["tokenizer.json"], vocab_size=model.vocab_size, eos_token_ids=eos_token_ids)
    return folder, of_grammars


def scheduler_config(config: EngineConfig, started: StartedRanks) -> SchedulerConfig:
    """The scheduler's configuration, from the engine's and from what the loaded model decides."""
    return SchedulerConfig(
        max_model_len=started.max_model_len,
        max_num_seqs=started.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting_requests=config.max_waiting_requests,
        scheduling_policy=config.scheduling_policy,
        async_scheduling=config.async_scheduling,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        num_speculative_tokens=config.num_speculative_tokens,
        draft_schedule=() if config.speculative_config is None else config.speculative_config.schedule,
        measures_drafts=True,
        compute_forced_tokens=not started.replays_decodes,
        eos_token_ids=started.eos_token_ids,
        last_token_tasks=started.model_config.pooling.last_token_tasks,
        whole_prompts=started.model_config.is_encoder,
    )


def make_media(
    config: EngineConfig, images: ImageConfig | None, audios: AudioConfig | None, encoder_blocks: EncoderBlocks
) -> Media:
    """`images`, `audios` None: the engine reads none."""
    cross: CrossAttention | None = None
    if audios and audios.input.cross_attention:
        cross = CrossAttention(encoder_blocks, audios.input.num_tokens, config.max_num_batched_tokens)
    size = config.num_encoder_cache_tokens(*(each.input for each in placed(images, audios)))
    return Media(
        MediaStore(int(config.images.mm_processor_cache_gb * 2**30)),
        EncoderCache(size, config.max_num_batched_tokens),
        attends_within=bool(images and images.attends_within),
        cross=cross,
    )


def max_image_tokens(config: EngineConfig, images: ImageConfig | None, *, max_num_seqs: int) -> int:
    """Of one image. A step that must compute all of an image also has a token, with its drafts, of each other running
    request, of which there are up to `max_num_seqs` - 1."""
    if images is None:
        return 0
    size, budget = config.num_encoder_cache_tokens(images.input), config.max_num_batched_tokens
    if not images.attends_within:
        return size
    num_others = min(max_num_seqs, budget) - 1
    return min(size, budget - num_others * (1 + config.num_speculative_tokens))
