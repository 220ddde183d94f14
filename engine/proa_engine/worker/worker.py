"""Worker: the life cycle of one rank: device, weights, KV cache, warm-up, shutdown. Its `model_runner` runs the
steps."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from torch._C._distributed_c10d import Store

from proa_engine.config import FITTING_LENGTH, EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.timing.step_costs import StepCosts
from proa_engine.core.types import BASE_MODEL, EMPTY_LORA, LoraSlot
from proa_engine.kernels.variants import hash_triton, on_compilation, on_kernel
from proa_engine.layers.cache_layers import CacheLayer, KeyValueLayer, StateLayer
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory import auto_config, kv_cache
from proa_engine.memory.cache_plan import CachePlan, plan_caches
from proa_engine.memory.fingerprint import cache_fingerprint
from proa_engine.memory.kv_cache import CacheSizes, WorkerSizes
from proa_engine.memory.rank_tiers import NoRankTiers, RankTiers, disk_folder, make_rank_tiers
from proa_engine.models.config import ModelConfig, at_stage
from proa_engine.models.drafters.load import FoundDrafter, find_drafter
from proa_engine.mover.messages import ToCore
from proa_engine.observability.progress import Progress
from proa_engine.observability.worker_spans import NoWorkerTracer, WorkerTracer, make_worker_tracer
from proa_engine.ranks.distributed import ALONE, Rendezvous, leave
from proa_engine.ranks.join import join_ranks
from proa_engine.ranks.stage_links import StageLinks
from proa_engine.sources.folders import read_config
from proa_engine.sources.resolve import resolve_model_of
from proa_engine.step.decode_graphs import (
    CudaGraphCapture,
    GraphCapture,
    GraphShape,
    ReportedCapture,
    graph_shapes,
)
from proa_engine.step.model_runner import ModelRunner
from proa_engine.step.prompt_graphs import PromptShape, max_tokens, prompt_shapes
from proa_engine.worker.compile_pool import CompilePool
from proa_engine.worker.device_memory import explain_out_of_memory
from proa_engine.worker.make_model_runner import Placement, RunnerPlan, describe, make_model_runner
from proa_engine.worker.memory_budget import check_cpu_weights, sizes_that_fit
from proa_engine.worker.warmup import WarmUp, run_warm_ups
from proa_engine.worker.weights import RankWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedRank:
    """What a rank has found out when it can run steps. It is the same after a sleep."""

    max_model_len: int  # at most as configured
    cache_groups: CacheGroups  # the KV cache, in the form that the core divides among requests
    step_costs: StepCosts
    load_rate: float  # bytes a second from host memory to the device; 0.0 without a host tier
    mover_port: int | None  # on which other engines fetch blocks; None: they cannot
    fingerprint: bytes  # what they must have in common with this one
    description: str  # of the model, its types and the device


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
        tracer: WorkerTracer | NoWorkerTracer | None = None,
    ) -> None:
        self.device: torch.device  # set by `init_device`, as are the next four
        self.model_config: ModelConfig
        self._folder: Path
        self._placement: Placement
        self._drafter: FoundDrafter | None
        self.weights: RankWeights  # set by `load_model`, as are the next two
        self._caches: CachePlan
        self._fingerprint = b""  # what engines must have in common to exchange blocks; empty without movers
        self.tiers: RankTiers = NoRankTiers()  # set by `start`, as are the next two
        self._plan: RunnerPlan
        self.model_runner: ModelRunner  # runs steps; deleted while the worker sleeps
        self._config = config
        self._rank = rank
        self._log = log
        self._ranks_here = ranks_here
        self._tracer = tracer or make_worker_tracer(rank, rank // config.parallel.tensor_parallel_size)
        self._at_exit = ExitStack()
        self._until_sleep = ExitStack()  # releases `model_runner`

    def init_device(self, rendezvous: Rendezvous = ALONE, store: Store | None = None) -> None:
        """Choose the device, read the model's configuration and join the process group if there are other ranks.

        Rank 0 passes the store that it opened.
        """
        config = self._config
        self.device = self._resolve_device()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            auto_config.limit_torch_threads(config.parallel.ranks_per_node)
        self._folder = resolve_model_of(config)
        model = self.model_config = self._read_model_config()
        self._drafter = self._find_drafter(model)
        split = model.expert_split(config.parallel.tensor_parallel_size)
        if self._rank == 0 and split is not None and (split.num_ranks > 1 or config.parallel.enable_expert_parallel):
            self._log(str(split))
        dtype = auto_config.resolve_dtype(config.dtype, model, self.device)
        cache_dtype = auto_config.resolve_cache_dtype(config.kv_cache_dtype, model, dtype, self.device)
        if self._rank == 0 and model.fp8_kv_cache and cache_dtype == dtype:
            self._log("the checkpoint's scales for a KV cache of 8-bit floats are not used")
        if self.device.type == "cpu":  # before the ranks join, when none has allocated memory yet
            check_cpu_weights(config, model, dtype, self._ranks_here)
        parallel, links = self._join(rendezvous, store)
        if config.parallel.pipeline_parallel_size > 1 and parallel.rank == 0:
            self._log(str(model.stage))
        parallel = replace(parallel, divides_latents=config.parallel.decode_context_parallel_size > 1)
        self._placement = Placement(self.device, dtype, cache_dtype, parallel, links)

    @explain_out_of_memory()
    def load_model(self, compile_pool: CompilePool | None = None) -> WorkerSizes:
        """Load this rank's share of the weights and compute how many KV cache blocks fit beside them.

        Then wait for `compile_pool`, if it is given.
        """
        config, placement = self._config, self._placement
        if self.device.type == "cuda":
            Thread(target=hash_triton, name="proa-triton").start()  # the first launch needs it; beside the weights
        self.weights = RankWeights(config, self._folder, self.model_config, placement, self._log, self._drafter)
        loaded = self.weights.load()
        if compile_pool is not None:
            self._log(compile_pool.wait())
            on_kernel(compile_pool.note)
        if self.device.type == "cuda":  # a barrier: one rank compiles for those that share its disk
            placement.parallel.all_reduce(torch.zeros(1, device=self.device)).item()
        own, longest = loaded.cache_layers(), self.model_config.max_position_embeddings
        if config.num_speculative_tokens and self._has_states_of_transformers():
            raise ValueError(
                f"speculative_config is not supported for {self.model_config.architecture}: transformers computes its "
                "recurrent layers, which cannot compute accepted tokens again"
            )
        layers, first = placement.links.gather_layers(own)
        caches = self._caches = plan_caches(
            layers, config.block_size, placement.cache_dtype, longest, range(first, first + len(own))
        )
        if config.kv_tiers.has_movers:
            self._fingerprint = self._make_fingerprint(own)
        sizes = kv_cache.configured_sizes(config, caches) or self._sizes_that_fit()
        sizes = kv_cache.with_host(sizes, config, caches)
        groups = kv_cache.cache_groups(config, caches, sizes)
        reads_images = self.model_config.images is not None
        needed = 2 if config.max_model_len == FITTING_LENGTH else longest
        kv_cache.check_room(groups, caches.block_bytes, needed, reads_images=reads_images)
        weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in loaded.parameters())
        return WorkerSizes(sizes, caches.block_bytes, weight_bytes, caches.tables, caches.state_bytes)

    def take_disk_folder(self) -> str:
        """Choose a folder in `kv_disk_path` for the ranks of this engine, and lock it until `shutdown`. Rank 0 alone,
        when its model is loaded.

        Empty if there is no disk. Raises `ValueError`.
        """
        return self._at_exit.enter_context(disk_folder(self._config, self._fingerprint, self._log))

    @explain_out_of_memory()
    def start(
        self, sizes: CacheSizes, disk_folder: str = "", on_mover: Callable[[ToCore], None] = lambda message: None
    ) -> StartedRank:
        """Allocate a KV cache of these sizes, the same on every rank, warm up, capture CUDA graphs and start the mover.

        `disk_folder` is what rank 0's `take_disk_folder` returned. `on_mover` is called, from any thread, with what the
        mover sends to the core.
        """
        started = time.monotonic()
        groups = kv_cache.cache_groups(self._config, self._caches, sizes)
        max_model_len = self._longest_request(groups)
        plan = self._plan = self._plan_runner(sizes)
        runner = self._make_runner()
        self._at_exit.callback(self._until_sleep.close)  # runs before distributed.leave
        self.tiers = make_rank_tiers(
            self._config,
            self._rank,
            sizes,
            self._caches,
            runner.memory,
            self._log,
            fingerprint=self._fingerprint,
            disk_folder=disk_folder,
        )
        self._at_exit.callback(self.tiers.close)
        step_costs = run_warm_ups(self._warm_ups(plan, runner, max_model_len), self._log)
        self._log(f"warmed up in {time.monotonic() - started:.1f} s")
        self._capture_graphs()
        stored = read_config(self._folder, self._config.hf_overrides).get("quantization_config") or {}
        if self.device.type == "cuda":
            on_compilation(partial(_log.warning, "kernel %s was compiled after the warm-up"))
        return StartedRank(
            max_model_len=max_model_len,
            cache_groups=groups,
            step_costs=step_costs,
            load_rate=self.tiers.load_rate,
            mover_port=self.tiers.start_mover(on_mover),
            fingerprint=self._fingerprint,
            description=describe(
                self.model_config, self._placement, self._config.quantization or stored.get("quant_method")
            ),
        )

    def sleep(self, level: int) -> None:
        """Free the KV cache, but not the host tier's memory. Level 1 also moves a GPU's weights to host memory; level 2
        drops the weights.

        CUDA graphs are deleted, because they contain addresses of the memory that is freed.
        """
        self._until_sleep.close()
        self.weights.sleep(level)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @explain_out_of_memory()
    def wake_up(self) -> None:
        """Undo `sleep`: get the weights back, allocate a new KV cache and capture CUDA graphs again.

        Nothing is warmed up, as the kernels stay compiled.
        """
        started = time.monotonic()
        self.weights.wake_up()
        self._make_runner()
        self._capture_graphs()
        self._log(f"woke up in {time.monotonic() - started:.1f} s")

    def shutdown(self) -> None:
        self._tracer.shutdown()
        self._at_exit.close()

    def _make_runner(self) -> ModelRunner:
        """Make the runner of `_plan`, with a new KV cache, and return it."""
        self.model_runner = make_model_runner(self._plan, self.weights.loaded)
        self._until_sleep.callback(self._release_runner)
        return self.model_runner

    def _release_runner(self) -> None:
        self.model_runner.release()
        del self.model_runner

    def _longest_request(self, groups: CacheGroups) -> int:
        """Return the maximum number of tokens of a request: as configured, or those that fit into the KV cache."""
        configured = self.model_config.max_position_embeddings
        if self._config.max_model_len != FITTING_LENGTH or groups.capacity >= configured:
            return configured
        if self._rank == 0:
            self._log(f"max_model_len is {groups.capacity:,}: the KV cache has no room for {configured:,} tokens")
        return groups.capacity

    def _resolve_device(self) -> torch.device:
        return auto_config.resolve_device(self._config.device, self._rank % self._config.parallel.ranks_per_node)

    def _find_drafter(self, model: ModelConfig) -> FoundDrafter | None:
        return find_drafter(self._config, model)

    def _read_model_config(self) -> ModelConfig:
        """Return the configuration of the model as this rank runs it; it has at least `max_model_len` positions."""
        config = self._config
        model = auto_config.resolve_model_config(config, self._folder, self.device)
        return at_stage(
            model, self._rank // config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
        )

    def _join(self, rendezvous: Rendezvous, store: Store | None) -> tuple[ParallelContext, StageLinks]:
        if rendezvous != ALONE:
            self._at_exit.callback(leave)  # also if only some of the groups can be made
        return join_ranks(self._config, rendezvous, store, self.device, self._log)

    def _make_fingerprint(self, layers: Sequence[CacheLayer]) -> bytes:
        return cache_fingerprint(
            self._config,
            self._folder,
            self.weights.digest,
            layers,
            self._caches,
            dtype=self._placement.dtype,
            cache_dtype=self._placement.cache_dtype,
            num_positions=self.model_config.max_position_embeddings,
            device=self.device,
        )

    def _sizes_that_fit(self) -> CacheSizes:
        """Return the sizes of the largest KV cache that fits beside the weights."""
        longest = self.model_config.max_position_embeddings
        smallest = self._plan_runner(
            CacheSizes(num_blocks=1, num_state_slots=2, max_num_seqs=self._config.max_num_seqs)
        )
        return sizes_that_fit(
            smallest,
            self.weights.loaded,
            lambda runner: self._warm_ups(smallest, runner, longest)[-1].run_largest(),
            max_model_len=longest,
            ranks_here=self._ranks_here,
            log=self._log,
        )

    def _plan_runner(self, sizes: CacheSizes) -> RunnerPlan:
        """Return the plan of a runner with a KV cache of these sizes. The model must be loaded."""
        config = replace(self._config, max_num_seqs=sizes.max_num_seqs)
        shapes = self._graph_shapes(config)
        prompt_shapes = self._prompt_shapes(config) if shapes else []
        return RunnerPlan(config, self._placement, self._caches, sizes, self._tracer, shapes, prompt_shapes)

    def _warm_ups(self, plan: RunnerPlan, runner: ModelRunner, max_model_len: int) -> list[WarmUp]:
        """Return warm-ups of requests without an adapter, and, if adapters are enabled, with one that adds nothing."""
        model, loras = self.model_config, [BASE_MODEL, LoraSlot(EMPTY_LORA, 0)]
        return [
            WarmUp(
                runner,
                plan.config,
                vocab_size=model.vocab_size,
                max_model_len=max_model_len,
                groups=kv_cache.cache_groups(plan.config, plan.caches, plan.sizes),
                lora=lora,
                pooling=model.pooling,
                generates=model.has_lm_head,
                whole_prompts=model.is_encoder,
                images=model.images,
                audios=model.audios,
            )
            for lora in (loras if plan.config.lora.enable_lora else loras[:1])
        ]

    def _capture_graphs(self) -> None:
        if num_shapes := self._plan.num_graphs:
            started = time.monotonic()
            progress = Progress(self._log, "capturing CUDA graphs", num_shapes, "sizes")
            self.model_runner.capture_graphs(ReportedCapture(self._graph_capture(), lambda: progress.add(1)))
            self._log(f"captured CUDA graphs of {num_shapes} sizes in {time.monotonic() - started:.1f} s")

    def _graph_shapes(self, config: EngineConfig) -> list[GraphShape]:
        """Return the shapes of decode steps to capture: none on a CPU, if the model generates no tokens, or if a step
        reads slots of states on the host."""
        if self.device.type == "cpu" or config.enforce_eager or not self.model_config.has_lm_head:
            return []
        if self._has_states_of_transformers():
            return []
        num_decodes = -(-config.max_num_seqs // config.parallel.pipeline_parallel_size)  # at most in a step
        return graph_shapes(
            num_decodes,
            config.num_speculative_tokens,
            config.max_num_batched_tokens,
            with_loras=config.lora.enable_lora,
        )

    def _has_states_of_transformers(self) -> bool:
        return self.model_config.is_adapted and any(
            isinstance(layer, StateLayer) for layer in self.weights.loaded.cache_layers()
        )

    def _prompt_shapes(self, config: EngineConfig) -> list[PromptShape]:
        """Return the shapes of steps with prompts to capture if decode steps are, none with several ranks.

        A graph has no inputs of features, and none of layers that are not attention to keys and values.
        """
        model = self.model_config
        is_plain = all(isinstance(layer, KeyValueLayer) for layer in self.weights.loaded.cache_layers())
        has_features = config.lora.enable_lora or config.num_speculative_tokens or model.images is not None
        if config.parallel.num_ranks > 1 or has_features or not is_plain:
            return []
        most = max_tokens(kv_cache.num_multiplied(model), multiplies_8_bits=model.multiplies_8_bits)
        return prompt_shapes(config.max_num_seqs, min(most, config.max_num_batched_tokens))

    def _graph_capture(self) -> GraphCapture:
        return CudaGraphCapture()
