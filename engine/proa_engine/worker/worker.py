"""Worker: the life cycle of one rank: device, weights, KV cache, warm-up, shutdown. Its `model_runner` runs the
steps."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from threading import Thread

import torch
from torch._C._distributed_c10d import Store

from proa_engine.config import FITTING_LENGTH, EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.step_costs import StepCosts
from proa_engine.core.types import Copies, LoraSlot
from proa_engine.kernels.variants import hash_triton, on_compilation, on_kernel
from proa_engine.layers.cache_layers import KeyValueLayer
from proa_engine.layers.lora import LoraMethod, LoraProducts
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory import auto_config, kv_cache
from proa_engine.memory.arena_memory import ArenaMemory, anonymous_memory, existing_bytes, open_file
from proa_engine.memory.cache_plan import CacheMemory, CachePlan, plan_caches
from proa_engine.memory.fingerprint import cache_fingerprint, digest_of_ranks
from proa_engine.memory.host import HostMemory, read_memory
from proa_engine.memory.host_arena import HostArena, arena_layout
from proa_engine.memory.kv_cache import CacheSizes, WorkerSizes, cpu_encoder_bytes, encoder_cache_bytes
from proa_engine.memory.mover_process import MoverProcess
from proa_engine.memory.requirements import check_weights, weights_room
from proa_engine.models.config import ModelConfig, at_stage
from proa_engine.models.digest import WeightsDigest
from proa_engine.models.loader import load_model, load_pooling_heads
from proa_engine.mover.disk import MIN_SEGMENTS
from proa_engine.mover.disk_slots import delete_abandoned, take_slot
from proa_engine.mover.layout import ArenaLayout
from proa_engine.mover.messages import DiskSettings, Init, ToCore
from proa_engine.observability.progress import Progress
from proa_engine.observability.worker_spans import WorkerTracer
from proa_engine.ranks import distributed, symmetric_memory
from proa_engine.ranks.stage_links import StageLinks, join_stages
from proa_engine.sources.folders import read_config
from proa_engine.sources.resolve import resolve_model_of
from proa_engine.step.decode_graphs import (
    CudaGraphCapture,
    GraphCapture,
    GraphShape,
    ReportedCapture,
    graph_shapes,
)
from proa_engine.step.loras import EMPTY_LORA, LoraAdapters
from proa_engine.step.model_runner import ModelRunner
from proa_engine.step.prompt_graphs import MAX_PRODUCTS, PromptShape, prompt_shapes
from proa_engine.worker.compile_pool import CompilePool
from proa_engine.worker.device_memory import explain_out_of_memory, measure_memory
from proa_engine.worker.make_model_runner import LoadedModel, Placement, make_model_runner
from proa_engine.worker.warmup import WarmUp

_log = logging.getLogger(__name__)


class Worker:
    """One rank. Call `init_device`, `load_model` and `start` in this order; then `model_runner` can run steps.

    Everything runs in the calling thread. `log` is called with lines about the progress; warnings are logged with the
    rank. `ranks_here` is the number of ranks that share the container or machine. `tracer` makes the rank's spans
    (default: as the environment configures it).
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        log: Callable[[str], None],
        *,
        ranks_here: int = 1,
        tracer: WorkerTracer | None = None,
    ) -> None:
        self.device: torch.device
        self.model_config: ModelConfig
        self.max_model_len: int
        self.step_costs = StepCosts()  # set by `start`
        self._config = config
        self._rank = rank
        self._log = log
        self._ranks_here = ranks_here
        self._tracer = tracer or WorkerTracer.from_environment(rank, rank // config.parallel.tensor_parallel_size)
        self._at_exit = ExitStack()
        self._placement: Placement
        self._loaded: LoadedModel | None = None  # None until loaded, and while it sleeps at level 2
        self._weights_digest = b""  # of all ranks; set by `load_model` if there are movers
        self._runner: ModelRunner | None = None  # None until started, and while it sleeps
        self._loras: LoraAdapters | None = None  # None until the model is loaded, and without enable_lora
        self._plan: CachePlan
        self._sizes: CacheSizes  # set by `start`
        self._arena: HostArena | None = None  # None until started, and without a host tier
        self._load_rate = 0.0  # bytes a second from the arena to the device; set by `start`
        self.mover: MoverProcess | None = None
        self.disk_folder: str | None = None  # of all ranks; None: not chosen yet, or no disk is configured

    @property
    def model_runner(self) -> ModelRunner:
        """The runner of steps. It exists between `start` and `shutdown`, except while the worker sleeps."""
        assert self._runner is not None
        return self._runner

    def describe(self) -> str:
        """Return what the model is, the types of its weights and activations, and the device. The model must be
        loaded."""
        stored = read_config(self._folder, self._config.hf_overrides).get("quantization_config") or {}
        quantization = self._config.quantization or stored.get("quant_method")
        placement = self._placement
        dtype = str(placement.dtype).removeprefix("torch.") + (f" ({quantization})" if quantization else "")
        if placement.cache_dtype != placement.dtype:
            dtype += f", KV cache {str(placement.cache_dtype).removeprefix('torch.')}"
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return f"{self.model_config.architecture}, {dtype}, {device}"

    def cache_groups(self, sizes: CacheSizes) -> CacheGroups:
        """Return a KV cache of these sizes, in the form that the core divides among requests. The model must be
        loaded."""
        return kv_cache.cache_groups(self._config, self._plan, sizes)

    def host_tier(self, rank_sizes: Sequence[WorkerSizes]) -> HostTierConfig | None:
        """Return the host tier of ranks with these sizes; None if there is none. The worker must be started."""
        return kv_cache.host_tier(self._config, rank_sizes, self.device.type, self._load_rate)

    def init_device(self, rendezvous: distributed.Rendezvous | None = None, store: Store | None = None) -> None:
        """Choose the device, read the model's configuration and join the process group if there are other ranks."""
        config = self._config
        self.device = self._resolve_device()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            auto_config.limit_torch_threads(config.parallel.ranks_per_node)
        self._folder = resolve_model_of(config)
        self.model_config = self._read_model_config()
        self.max_model_len = self.model_config.max_position_embeddings
        split = self.model_config.expert_split(config.parallel.tensor_parallel_size)
        if self._rank == 0 and split is not None and (split.num_ranks > 1 or config.parallel.enable_expert_parallel):
            self._log(str(split))
        dtype = auto_config.resolve_dtype(config.dtype, self.model_config, self.device)
        cache_dtype = auto_config.resolve_cache_dtype(config.kv_cache_dtype, self.model_config, dtype, self.device)
        if self._rank == 0 and self.model_config.fp8_kv_cache and cache_dtype == dtype:
            self._log("the checkpoint's scales for a KV cache of 8-bit floats are not used")
        if self.device.type == "cpu":  # before the ranks join, when none has allocated memory yet
            weight_bytes = kv_cache.weight_bytes(
                self.model_config, dtype.itemsize, config.parallel.tensor_parallel_size
            )
            check_weights(weight_bytes, weights_room(self._memory(), self._ranks_here))
        parallel, links = self._join_stages(self._join(rendezvous, store))
        parallel = replace(parallel, divides_latents=config.parallel.decode_context_parallel_size > 1)
        parallel = self._with_symmetric_memory(parallel)
        self._placement = Placement(self.device, dtype, cache_dtype, parallel, links)

    @explain_out_of_memory()
    def load_model(self, compile_pool: CompilePool | None = None) -> WorkerSizes:
        """Load this rank's share of the weights and compute how many KV cache blocks fit beside them.

        Then wait for `compile_pool`, if it is given.
        """
        config = self._config
        if self.device.type == "cuda":
            Thread(target=hash_triton, name="proa-triton").start()  # the first launch needs it; beside the weights
        placement, loaded = self._placement, self._load_weights()
        self._loaded = loaded
        if compile_pool is not None:
            self._log(compile_pool.wait())
            on_kernel(compile_pool.note)
        if self.device.type == "cuda":  # a barrier: one rank compiles for those that share its disk
            placement.parallel.all_reduce(torch.zeros(1, device=self.device)).item()
        own = loaded.model.cache_layers()
        layers, first = placement.links.gather_layers(own)
        plan = self._plan = plan_caches(
            layers, config.block_size, placement.cache_dtype, self.max_model_len, range(first, first + len(own))
        )
        sizes = kv_cache.configured_sizes(config, plan) or self._sizes_that_fit(plan)
        sizes = kv_cache.with_host(sizes, config, plan)
        groups = self.cache_groups(sizes)
        reads_images = self.model_config.images is not None
        needed = 2 if config.max_model_len == FITTING_LENGTH else self.max_model_len
        kv_cache.check_room(groups, plan.block_bytes, needed, reads_images=reads_images)
        weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in loaded.model.parameters())
        return WorkerSizes(sizes, plan.block_bytes, weight_bytes, plan.tables, plan.state_bytes)

    @explain_out_of_memory()
    def start(self, sizes: CacheSizes) -> None:
        """Allocate a KV cache of these sizes, the same on every rank, warm up and capture CUDA graphs."""
        started = time.monotonic()
        if self._config.max_model_len == FITTING_LENGTH:
            self._fit_length(self.cache_groups(sizes).capacity)
        self._sizes = sizes
        self._config = replace(self._config, max_num_seqs=sizes.max_num_seqs)
        self._runner = self._make_model_runner(sizes, self._graph_shapes(), self._prompt_shapes())
        if sizes.num_host_pages:
            on_copied = self._on_copied if self._config.kv_tiers.has_movers else None
            self._arena = HostArena(self._runner.memory, self._arena_memory(self._runner.memory, sizes), on_copied)
            self._at_exit.callback(self._arena.close)
            self._load_rate = self._arena.measure_load_rate(self._runner.memory)
        self._at_exit.callback(self._release_runner)  # runs before distributed.leave
        warm_ups = [self._warm_up(self.model_runner, sizes, lora) for lora in self._warm_up_loras()]
        progress = Progress(self._log, "warming up", sum(each.count_steps() for each in warm_ups), "steps")
        for warm_up in warm_ups:
            self.step_costs = self.step_costs.longest_of(warm_up.run(lambda: progress.add(1)))
        self._log(f"warmed up in {time.monotonic() - started:.1f} s")
        self._capture_graphs()
        if self.device.type == "cuda":
            on_compilation(partial(_log.warning, "kernel %s was compiled after the warm-up"))

    @cached_property
    def cache_fingerprint(self) -> bytes:
        """What engines must have in common to exchange blocks. The model must be loaded, and there must be movers."""
        assert self._loaded is not None
        return cache_fingerprint(
            self._config,
            self._folder,
            self._weights_digest,
            self._loaded.model.cache_layers(),
            self._plan,
            dtype=self._placement.dtype,
            cache_dtype=self._placement.cache_dtype,
            num_positions=self.model_config.max_position_embeddings,
            device=self.device,
        )

    def take_disk_folder(self) -> str | None:
        """Choose a folder in `kv_disk_path` for the ranks of this engine, and lock it until `shutdown`. Rank 0 alone.

        None if there is no disk. Raises `ValueError`.
        """
        if self._config.kv_tiers.kv_disk_path is None:
            return None
        path = Path(self._config.kv_tiers.kv_disk_path)
        try:
            for folder in delete_abandoned(path, time.time()):
                self._log(f"kv_disk_path: deleted {folder}, which no engine has used for a week")
            folder, lock = take_slot(path, self.cache_fingerprint)
        except OSError as error:
            raise ValueError(f"kv_disk_path: {path} cannot be used: {error.strerror or error}") from error
        self._at_exit.callback(os.close, lock)
        self._log(f"KV cache on disk in {folder}")
        self.disk_folder = str(folder)
        return self.disk_folder

    def start_mover(self, on_message: Callable[[ToCore], None]) -> MoverProcess | None:
        """Start the rank's mover, if the configuration has one. `on_message` is called with what it sends to the
        core."""
        tiers = self._config.kv_tiers
        if self._arena is None or not tiers.has_movers:
            return None
        host, port = self._transfer_address()
        init = Init(
            layout=self._arena.memory.layout,
            host=host,
            port=port,
            rank=self._rank,
            num_ranks=self._config.parallel.tensor_parallel_size,
            fingerprint=self.cache_fingerprint,
            since=self._arena.memory.since,
            epoch=self._arena.memory.epoch,
            disk=self._disk_settings(self._arena.memory.layout),
            tls=self._config.peer_tls,
            sources=() if tiers.kv_transfer_address is None else tiers.kv_transfer_sources,
        )
        self.mover = MoverProcess(init, self._arena.memory.descriptor, on_message, _log.warning)
        self._at_exit.callback(self.mover.close)
        return self.mover

    def begin_step(self, copies: Copies) -> None:
        """Start the copies of the next step, and wait for those of the step before. Device work, before each step."""
        if self._arena is not None:
            self._arena.begin_step(copies, self.model_runner.memory)

    def sleep(self, level: int) -> None:
        """Free the KV cache, but not the host tier's memory. Level 1 also moves a GPU's weights to host memory; level 2
        drops the weights.

        CUDA graphs are deleted, because they contain addresses of the memory that is freed.
        """
        loaded, self._loaded = self._loaded, None
        assert loaded is not None, "the worker sleeps already"
        self._release_runner()
        if level == 1:
            loaded.move_to(torch.device("cpu"))
            self._loaded = loaded
        del loaded  # at level 2 the last reference, so that the memory is returned to the device
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @explain_out_of_memory()
    def wake_up(self) -> None:
        """Undo `sleep`: get the weights back, allocate a new KV cache and capture CUDA graphs again.

        Nothing is warmed up, as the kernels stay compiled.
        """
        started = time.monotonic()
        if self._loaded is None:
            self._loaded = self._load_weights()
        else:
            self._loaded.move_to(self.device)
        self._runner = self._make_model_runner(self._sizes, self._graph_shapes(), self._prompt_shapes())
        self._capture_graphs()
        self._log(f"woke up in {time.monotonic() - started:.1f} s")

    def load_lora(self, lora_id: int, path: str) -> str:
        """Read this rank's part of an adapter into host memory, and return the digest of the whole.

        May run on any thread. Raises `LoraNotFound` or `LoraInvalid`.
        """
        assert self._loras is not None, "the core loads no adapters without enable_lora"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # page-locked memory belongs to a device's context
        return self._loras.load(lora_id, path)

    def unload_lora(self, lora_id: int) -> None:
        """Free an adapter's host memory, if it is loaded. No later step may fill a slot with it."""
        assert self._loras is not None
        self._loras.unload(lora_id)

    def shutdown(self) -> None:
        self._tracer.shutdown()
        self._at_exit.close()

    def _arena_memory(self, on_device: CacheMemory, sizes: CacheSizes) -> ArenaMemory:
        """Return host memory of these sizes: a file if the configuration names a folder for it."""
        folder = self._config.kv_tiers.kv_offloading_path
        layout = arena_layout(
            on_device,
            sizes.num_host_pages,
            sizes.num_host_states,
            tail_columns=self._plan.tail_columns,
            has_directory=folder is not None,
        )
        if folder is None:
            return anonymous_memory(layout)
        memory = open_file(Path(folder), self._rank, layout, self.cache_fingerprint)
        found = "continues with what an earlier engine has left" if memory.is_adopted else "is empty"
        self._log(f"host memory in {folder} {found}")
        return memory

    def _disk_settings(self, layout: ArenaLayout) -> DiskSettings | None:
        """Return this rank's part of the disk, None if there is none. Raises `ValueError`."""
        if self.disk_folder is None:
            return None
        num_bytes = int(self._config.kv_tiers.kv_disk_size * 2**30) // self._config.parallel.tensor_parallel_size
        least = MIN_SEGMENTS * max(layout.page_bytes, sum(layout.state_bytes))
        if num_bytes < least:
            least_gib = least * self._config.parallel.tensor_parallel_size / 2**30
            raise ValueError(f"kv_disk_size must be at least {least_gib:.3f} GiB, {MIN_SEGMENTS} blocks of each rank")
        return DiskSettings(
            folder=str(Path(self.disk_folder) / f"rank-{self._rank}"),
            num_bytes=num_bytes,
            bytes_per_second=self._config.kv_tiers.kv_disk_write_mb_per_second * 1e6,
        )

    def _transfer_address(self) -> tuple[str, int | None]:
        """Return the host and port on which the rank's mover listens. 0: any free port; None: it does not listen."""
        address = self._config.kv_tiers.kv_transfer_address
        if address is None:
            return "", None
        host, _, port = address.rpartition(":")
        return host.strip("[]"), int(port) + self._rank if int(port) else 0

    def _on_copied(self, copies: Copies) -> None:
        if self.mover is not None:
            self.mover.copied(copies)

    def _release_runner(self) -> None:
        if self._runner is not None:
            self._runner.release()
        self._runner = None

    def _fit_length(self, capacity: int) -> None:
        """Lower `max_model_len` to the tokens of one request that fit into the KV cache."""
        if capacity < self.max_model_len:
            if self._rank == 0:
                self._log(f"max_model_len is {capacity:,}: the KV cache has no room for {self.max_model_len:,} tokens")
            self.max_model_len = capacity

    def _read_model_config(self) -> ModelConfig:
        """Return the configuration of the model as this rank runs it; it has at least `max_model_len` positions."""
        config = self._config
        model = auto_config.resolve_model_config(config, self._folder, self.device)
        return at_stage(
            model, self._rank // config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
        )

    def _join(self, rendezvous: distributed.Rendezvous | None, store: Store | None) -> ParallelContext:
        if rendezvous is None:
            return ParallelContext(0, 1, None)
        parallel = distributed.join(rendezvous, self.device, store)
        self._at_exit.callback(distributed.leave)
        return parallel

    def _join_stages(self, world: ParallelContext) -> tuple[ParallelContext, StageLinks]:
        """Divide the ranks among pipeline stages. Returns the ranks of this rank's stage, and its links."""
        parallel, links = join_stages(world, self._config.parallel.pipeline_parallel_size)
        if world.world_size > parallel.world_size and parallel.rank == 0:
            self._log(str(self.model_config.stage))
        return parallel, links

    def _with_symmetric_memory(self, parallel: ParallelContext) -> ParallelContext:
        """Return the context of a stage's ranks with symmetric memory, if they are GPUs that have it in common."""
        config = self._config
        if self.device.type != "cuda" or parallel.group is None or config.parallel.disable_custom_all_reduce:
            return parallel
        size = config.parallel.tensor_parallel_size
        devices = symmetric_memory.devices_of_stage(self._rank // size, size, config.parallel.ranks_here)
        if size == 1 or devices is None:
            return parallel
        opened = symmetric_memory.open_all_reduce(parallel.group, self.device, devices, self._log)
        return replace(parallel, symmetric=opened)

    def _load_weights(self) -> LoadedModel:
        config, model_config, placement = self._config, self.model_config, self._placement
        if config.lora.enable_lora:
            products = LoraProducts(
                config.lora.max_loras,
                config.lora.max_lora_rank,
                placement.dtype,
                self.device,
                batch_invariant=config.batch_invariant,
            )
            model_config = replace(model_config, linear_method=LoraMethod(model_config.linear_method, products))
        digest = WeightsDigest() if config.kv_tiers.has_movers else None  # nothing else asks for it
        model = load_model(
            self._folder,
            model_config,
            dtype=placement.dtype,
            device=self.device,
            parallel=placement.parallel,
            load_format=config.load_format,
            seed=config.seed,
            report=self._log,
            digest=digest,
        )
        if digest is not None:
            self._keep_digest(digest_of_ranks(digest.digest(), placement.parallel, self.device))
        heads = load_pooling_heads(
            self._folder, model_config, model, device=self.device, load_format=config.load_format, seed=config.seed
        )
        if config.lora.enable_lora and self._loras is None:
            others = model_config.stage.others(len(model_config.layers))
            self._loras = LoraAdapters(products, others, config.downloads)
        elif self._loras is not None:
            self._loras.move_to(products)
        return LoadedModel(self.model_config, model, heads, self._loras)

    def _keep_digest(self, digest: bytes) -> None:
        """Keep the digest of the weights that were just loaded. Raises `ValueError` if it is not that of the start, by
        which the host tier's file, the disk and other engines know this engine's blocks."""
        if self._weights_digest not in (b"", digest):
            raise ValueError(
                f"the weights in {self._folder} have changed since the engine started, and blocks of its KV cache are "
                "kept and exchanged as those of the weights at the start: restart the engine"
            )
        self._weights_digest = digest

    def _capture_graphs(self) -> None:
        if num_shapes := len(self._graph_shapes()) + len(self._prompt_shapes()):
            started = time.monotonic()
            progress = Progress(self._log, "capturing CUDA graphs", num_shapes, "sizes")
            self.model_runner.capture_graphs(ReportedCapture(self._graph_capture(), lambda: progress.add(1)))
            self._log(f"captured CUDA graphs of {num_shapes} sizes in {time.monotonic() - started:.1f} s")

    def _make_model_runner(
        self, sizes: CacheSizes, shapes: Sequence[GraphShape], prompt_shapes: Sequence[PromptShape] = ()
    ) -> ModelRunner:
        assert self._loaded is not None, "load the model first"
        options = self._config, self._loaded, self._placement, self._plan, sizes
        return make_model_runner(*options, shapes, prompt_shapes, tracer=self._tracer)

    def _warm_up_loras(self) -> list[LoraSlot | None]:
        """Return the adapters of warm-up requests: none, and, if adapters are enabled, one that adds nothing."""
        return [None] if self._loras is None else [None, LoraSlot(EMPTY_LORA, 0)]

    def _warm_up(self, runner: ModelRunner, sizes: CacheSizes, lora: LoraSlot | None) -> WarmUp:
        return WarmUp(
            runner,
            self._config,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            groups=self.cache_groups(sizes),
            lora=lora,
            pooling=self.model_config.pooling,
            generates=self.model_config.has_lm_head,
            whole_prompts=self.model_config.is_encoder,
            images=self.model_config.images,
        )

    def _resolve_device(self) -> torch.device:
        return auto_config.resolve_device(self._config.device, self._rank % self._config.parallel.ranks_per_node)

    def _graph_shapes(self) -> list[GraphShape]:
        """Return the shapes of decode steps to capture: none on a CPU, or if the model generates no tokens."""
        config = self._config
        if self.device.type == "cpu" or config.enforce_eager or not self.model_config.has_lm_head:
            return []
        num_decodes = -(-config.max_num_seqs // config.parallel.pipeline_parallel_size)  # at most in a step
        return graph_shapes(
            num_decodes,
            config.num_speculative_tokens,
            config.max_num_batched_tokens,
            with_loras=config.lora.enable_lora,
        )

    def _prompt_shapes(self) -> list[PromptShape]:
        """Return the shapes of steps with prompts to capture, none with several ranks. The model must be loaded.

        A graph has no inputs of features, and none of layers that are not attention to keys and values.
        """
        config, model = self._config, self.model_config
        assert self._loaded is not None
        is_plain = all(isinstance(layer, KeyValueLayer) for layer in self._loaded.model.cache_layers())
        has_features = config.lora.enable_lora or config.num_speculative_tokens or model.images is not None
        if not self._graph_shapes() or config.parallel.num_ranks > 1 or has_features or not is_plain:
            return []
        most = min(MAX_PRODUCTS // kv_cache.num_multiplied(model), config.max_num_batched_tokens)
        return prompt_shapes(config.max_num_seqs, most)

    def _graph_capture(self) -> GraphCapture:
        return CudaGraphCapture()

    def _sizes_that_fit(self, plan: CachePlan) -> CacheSizes:
        if self.device.type == "cuda":
            return kv_cache.gpu_sizes(self._cuda_budget(), self._config, plan, self.max_model_len)
        itemsize = self._placement.dtype.itemsize
        workspace = kv_cache.cpu_workspace(self._config, self.model_config, itemsize)
        budget = kv_cache.cpu_budget(
            self._memory(),
            utilization=self._config.gpu_memory_utilization,
            ranks_here=self._ranks_here,
            workspace=workspace
            + cpu_encoder_bytes(self._config, self.model_config.images, self.max_model_len, itemsize)
            + kv_cache.host_bytes(self._config),
        )
        return kv_cache.cpu_sizes(budget, self._config, plan, self.max_model_len)

    def _memory(self) -> HostMemory:
        """Return the memory of this machine. What an earlier engine has left in the host tier's files is available."""
        memory, folder = read_memory(), self._config.kv_tiers.kv_offloading_path
        return memory if folder is None else replace(memory, available=memory.available + existing_bytes(Path(folder)))

    def _cuda_budget(self) -> int:
        """Return the bytes for the KV cache, measured with the smallest cache and the largest graphs."""
        shapes, prompts = self._graph_shapes(), self._prompt_shapes()
        smallest = CacheSizes(num_blocks=1, num_state_slots=2, max_num_seqs=self._config.max_num_seqs)
        runner = self._make_model_runner(smallest, shapes[-2:], prompts[-2:])
        usage = measure_memory(
            self._warm_up(runner, smallest, self._warm_up_loras()[-1]).run_largest,
            runner.capture_graphs if shapes else None,
            num_graphs=len(shapes) + len(prompts),
            utilization=self._config.gpu_memory_utilization,
            encoded_images=encoder_cache_bytes(self._config, self.model_config.images, self._placement.dtype.itemsize),
        )
        self._log(str(usage))
        del runner
        torch.cuda.empty_cache()
        return usage.available
