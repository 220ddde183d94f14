"""Worker: one rank from nothing to ready: device, model, KV cache, warm-up; then the steps.

Every method does its work in the caller's thread. Knows nothing of sockets and of who plans.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from proa_engine.config import EngineConfig
from proa_engine.core.types import SchedulerOutput
from proa_engine.kernels.variants import on_compilation
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.base import CausalLM
from proa_engine.models.batch_invariance import make_batch_invariant
from proa_engine.models.config import ModelConfig
from proa_engine.models.loader import load_model, resolve_model
from proa_engine.worker import choices, distributed, kv_cache
from proa_engine.worker.async_output import StepTensors
from proa_engine.worker.compile_pool import CompilePool
from proa_engine.worker.decode_graphs import CudaRecorder, DecodeGraphs, Recorder, graph_sizes
from proa_engine.worker.device_memory import measure_memory, told_when_too_little
from proa_engine.worker.drafter import Drafter
from proa_engine.worker.host import read_memory
from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.model_runner import ModelRunner
from proa_engine.worker.small_steps import SmallSteps
from proa_engine.worker.step_inputs import StepInputs
from proa_engine.worker.warmup import StepLimits, WarmUp
from proa_engine.worker_spans import WorkerTracer

Report = Callable[[str], None]

# Enough to touch every weight and to time a step by; a whole budget would take a CPU a minute with a large model.
_CPU_WARM_UP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class WorkerSizes:
    """What one rank holds, in bytes, and the room that it has."""

    num_blocks: int  # that fit
    block_bytes: int  # on this rank, all layers together
    weight_bytes: int
    num_kv_heads: int


class Worker:
    """One rank. In this order: `init_device`, `load_model`, `start`; then each step `prepare`, `forward`, `sample`."""

    def __init__(self, config: EngineConfig, rank: int, report: Report, *, ranks_here: int = 1) -> None:
        self.model_config: ModelConfig
        self.max_model_len: int
        self.device: torch.device
        self.kv_caches: list[Tensor] = []
        self.longest_step_seconds = 0.0  # of the warm-up, scaled to a step of the full token budget
        self._config = config
        self._rank = rank
        self._report = report
        self._ranks_here = ranks_here
        self._parallel = ParallelContext(0, 1, None)
        self._tracer = WorkerTracer.from_environment(rank)
        self._at_exit = ExitStack()
        self._compile_pool: CompilePool | None = None
        self._small_steps: SmallSteps
        self._runner: ModelRunner
        self._model: CausalLM
        self._dtype: torch.dtype
        self._cache_dtype: torch.dtype

    def init_device(self, rendezvous: distributed.Rendezvous | None = None, store: Store | None = None) -> None:
        """Choose the device, read the model's configuration, and meet the other ranks where there are any."""
        config = self._config
        self.device = self._choose_device()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            choices.limit_torch_threads(config.tensor_parallel_size)
        if self.device.type == "cuda" and (self._rank == 0 or config.worker_sockets):  # else rank 0 does it for all
            major, minor = torch.cuda.get_device_capability(self.device)
            self._compile_pool = CompilePool(config, 10 * major + minor)
        self._folder = resolve_model(config.model, config.revision, config.load_format)
        self.model_config = ModelConfig.from_folder(self._folder, config.quantization)
        if config.batch_invariant and self.device.type != "cpu":  # a CPU always is
            self.model_config = make_batch_invariant(self.model_config, config.tensor_parallel_size)
        self.max_model_len = choices.choose_max_model_len(config, self.model_config)
        num_parameters = choices.num_parameters(self.model_config)
        self._small_steps = SmallSteps(num_parameters)
        self._dtype = choices.choose_dtype(config.dtype, self.model_config, self.device)
        self._cache_dtype = choices.choose_cache_dtype(config.kv_cache_dtype, self._dtype)
        if self.device.type == "cpu":  # before the ranks meet: what is available then, none of them has taken yet
            estimate = num_parameters * self._dtype.itemsize // config.tensor_parallel_size
            kv_cache.check_weights(estimate, kv_cache.weights_room(read_memory(), self._ranks_here))
        if rendezvous is not None:
            self._parallel = distributed.join(rendezvous, self.device, store)
            self._at_exit.callback(distributed.leave)

    @told_when_too_little()
    def load_model(self) -> WorkerSizes:
        """Load this rank's share of the weights and say how many KV cache blocks fit beside them."""
        config = self._config
        self._model = load_model(
            self._folder,
            self.model_config,
            dtype=self._dtype,
            device=self.device,
            parallel=self._parallel,
            load_format=config.load_format,
            seed=config.seed,
            report=self._report,
        )
        if self._compile_pool is not None:
            self._report(self._compile_pool.wait())
        if self.device.type == "cuda":  # all ranks meet: none compiles for itself what rank 0 is compiling for it
            self._parallel.all_reduce(torch.zeros(1, device=self.device)).item()
        shape = self._model.kv_cache_shape(1, config.block_size)
        layout = kv_cache.CacheLayout(
            block_size=config.block_size,
            block_bytes=torch.Size(shape).numel() * self._cache_dtype.itemsize * self.model_config.num_layers,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
        num_blocks = kv_cache.given_blocks(config, layout)
        if num_blocks is None:
            num_blocks = self._blocks_that_fit(layout)
        kv_cache.check_room(num_blocks, layout)
        weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._model.parameters())
        return WorkerSizes(num_blocks, layout.block_bytes, weight_bytes, num_kv_heads=shape[2])

    @told_when_too_little()
    def start(self, num_blocks: int) -> None:
        """Allocate the KV cache, the same number of blocks on every rank, run first steps and record decodes."""
        started = time.monotonic()
        sizes = self._graph_sizes()
        self.kv_caches, self._runner = self._make_runner(num_blocks, sizes)
        self._at_exit.callback(self._runner.forget_graphs)  # before the ranks part
        self._warm_up(num_blocks)
        self._report(f"warmed up in {time.monotonic() - started:.1f} s")
        if sizes:
            started = time.monotonic()
            self._runner.capture_graphs(self._recorder())
            self._report(f"recorded decodes of {len(sizes)} sizes in {time.monotonic() - started:.1f} s")
        if self.device.type == "cuda":
            on_compilation(lambda kernel: self._report(f"{kernel} was compiled while requests waited"))

    def prepare(self, plan: SchedulerOutput) -> StepInputs | None:
        """Host side of a step; see ModelRunner."""
        for request_id in plan.finished_request_ids:
            self._tracer.finish(request_id)
        for request_id in plan.preempted_request_ids:
            self._tracer.finish(request_id)
        for new in plan.new_requests:
            self._tracer.start(new.request_id, new.trace_headers)
        return self._runner.prepare(plan)

    def is_small(self, inputs: StepInputs) -> bool:
        """Whether this step, on a CPU, is not worth waking a thread for.

        With other ranks none is: who waits for it must be told, not be in it, when one of them is lost.
        """
        return self._config.tensor_parallel_size == 1 and self._small_steps.include(inputs.num_tokens)

    def forward(self, inputs: StepInputs) -> None:
        with self._small_steps.one_thread(inputs.num_tokens):
            self._runner.forward(inputs)

    def sample(self) -> StepTensors:
        return self._runner.sample()

    def shutdown(self) -> None:
        self._tracer.shutdown()
        self._at_exit.close()

    def _make_runner(self, num_blocks: int, graph_sizes: Sequence[int]) -> tuple[list[Tensor], ModelRunner]:
        config, vocab_size = self._config, self.model_config.vocab_size
        shape = self._model.kv_cache_shape(num_blocks, config.block_size)
        # Left uninitialized: what no token was written to is never read, and on a CPU its pages are not even touched.
        kv_caches = [
            torch.empty(shape, dtype=self._cache_dtype, device=self.device) for _ in range(self.model_config.num_layers)
        ]
        batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            vocab_size=vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            device=self.device,
            max_drafts=config.num_speculative_tokens,
        )
        speculative = config.speculative_config
        runner = ModelRunner(
            self._model,
            kv_caches,
            batch,
            block_size=config.block_size,
            vocab_size=vocab_size,
            max_logprobs=config.max_logprobs,
            device=self.device,
            graphs=DecodeGraphs(graph_sizes, self.device) if graph_sizes else None,
            drafter=None if speculative is None else Drafter(speculative, batch, config.block_size),
        )
        return kv_caches, runner

    def _choose_device(self) -> torch.device:
        return choices.choose_device(self._config.device, self._rank)

    def _graph_sizes(self) -> list[int]:
        """Of the decodes to record: none on a CPU, which has no such thing, nor with drafts to check."""
        if self.device.type == "cpu" or self._config.enforce_eager or self._config.speculative_config is not None:
            return []
        return graph_sizes(self._config.max_num_seqs)

    def _recorder(self) -> Recorder:
        return CudaRecorder()

    def _blocks_that_fit(self, layout: kv_cache.CacheLayout) -> int:
        if self.device.type == "cuda":
            return self._cuda_budget() // layout.block_bytes
        memory = read_memory()
        budget = kv_cache.cpu_budget(
            memory,
            utilization=self._config.gpu_memory_utilization,
            ranks_here=self._ranks_here,
            workspace=choices.cpu_workspace(self._config, self.model_config, self._dtype),
        )
        return min(budget // layout.block_bytes, layout.most_useful_blocks)

    def _cuda_budget(self) -> int:
        sizes = self._graph_sizes()
        _, runner = self._make_runner(1, sizes[-2:])
        account = measure_memory(
            self._warm_up_of(runner, num_blocks=1).run_largest,
            runner.capture_graphs if sizes else None,
            num_graphs=len(sizes),
            utilization=self._config.gpu_memory_utilization,
        )
        self._report(str(account))
        del runner
        torch.cuda.empty_cache()
        return account.left

    def _warm_up(self, num_blocks: int) -> None:
        warm_up = self._warm_up_of(self._runner, num_blocks)
        warm_up.run_every_kind()
        if self.device.type != "cpu":
            warm_up.run_every_tiling()
        budget = self._config.max_num_batched_tokens
        most = _CPU_WARM_UP_TOKENS if self.device.type == "cpu" else budget
        num_tokens = min(most, budget, self.max_model_len - 1)
        prefill, decode = warm_up.time_prefill(num_tokens), warm_up.time_decode(num_tokens)
        self.longest_step_seconds = max(prefill * budget / num_tokens, decode)

    def _warm_up_of(self, runner: ModelRunner, num_blocks: int) -> WarmUp:
        config = self._config
        limits = StepLimits(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            max_logprobs=config.max_logprobs,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_drafts=config.num_speculative_tokens,
        )
        return WarmUp(runner, limits, torch.cuda.synchronize if self.device.type == "cuda" else lambda: None)
