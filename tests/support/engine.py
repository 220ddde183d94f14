"""An engine core with a real executor in this process, and the results of its requests. For integration tests."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from proa.blocks import checkpoint_positions, hash_block, root_hash
from proa.contract import EngineCoreRequest, FinishReason, PoolingParams, SamplingParams, TokenLogprobs
from proa_engine.config import EngineConfig
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.executor import StepFuture
from proa_engine.core.grammar import GrammarMasks, Grammars
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.types import SchedulerOutput
from proa_engine.engine_parts import make_loras, make_media, scheduler_config
from proa_engine.executor import make_executor
from proa_engine.executor.uniproc import UniProcExecutor
from proa_engine.layers.cache_layers import StateLayer

DEADLINE = 60.0  # seconds for one run, unless it says otherwise


class Watched:
    """An executor that records scheduler outputs. With `poison`, new blocks and states are filled with NaN."""

    def __init__(self, inner: UniProcExecutor, *, poison: bool) -> None:
        self.inner = inner
        self.plans: list[SchedulerOutput] = []
        self._poison = poison

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.plans.append(scheduler_output)
        if self._poison:
            blocks, states = self._fresh_blocks(scheduler_output), _fresh_states(scheduler_output)
            # In the order of the steps, which a GPU executor launches on this thread.
            if self.inner._worker.device.type == "cuda":
                self._fill(blocks, states)
            else:
                self.inner._device_thread.submit(lambda: self._fill(blocks, states))
        self.inner.execute_model(scheduler_output)

    def draft_tokens(self) -> Mapping[int, Sequence[int]]:
        return self.inner.draft_tokens()

    def sample_tokens(self, masks: GrammarMasks | None = None) -> StepFuture:
        return self.inner.sample_tokens(masks)

    def sleep(self, level: int) -> None:
        self.inner.sleep(level)

    def wake_up(self) -> None:
        self.inner.wake_up()

    def shutdown(self) -> None:
        self.inner.shutdown()

    def _fresh_blocks(self, plan: SchedulerOutput) -> list[int]:
        """Newly allocated blocks, without those from the prefix cache."""
        blocks = [block for cached in plan.cached_requests for table in cached.new_block_ids for block in table]
        blocks += [block for audio in plan.cross_inputs for block in audio.block_ids]
        for new in plan.new_requests:
            for table in new.block_ids:
                blocks += table[new.num_computed_tokens // self.inner.started.cache_groups.block_size :]
        return blocks

    def _fill(self, blocks: list[int], states: list[int]) -> None:
        worker = self.inner._worker
        memory = worker.model_runner.memory
        caches = [*memory.layers, *memory.drafter_layers]
        for layer, cache in zip(worker.weights.loaded.cache_layers(), caches, strict=True):
            for tensor in cache.tensors:
                tensor[states if isinstance(layer, StateLayer) else blocks] = torch.nan


def _fresh_states(plan: SchedulerOutput) -> list[int]:
    """Slots that the step writes and does not read before."""
    return [slot for steps in plan.states.values() for _, slot in steps.writes if slot != steps.read]


@dataclass
class Engine:
    core: EngineCore
    executor: UniProcExecutor
    watched: Watched

    @property
    def plans(self) -> list[SchedulerOutput]:
        return self.watched.plans


@dataclass
class Result:
    """The merged outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    pooled: bytes = b""
    num_pooled_rows: int = 0

    @property
    def values(self) -> torch.Tensor:
        """[rows, values] float32 of a pooled request."""
        return torch.frombuffer(bytearray(self.pooled), dtype=torch.float32).view(self.num_pooled_rows, -1)


@contextmanager
def build_core(
    model: Path | str,
    *,
    poison: bool = False,
    block_seed: int | None = None,
    grammars: Any = None,
    **config: Any,
) -> Iterator[Engine]:
    """An engine on the CPU; `config` are EngineConfig's fields. `block_seed` allocates blocks in a random order.
    `grammars`: a `Grammars`."""
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 64, "kv_cache_memory_bytes": 16 * 2**20}
    chosen = EngineConfig.from_options(model=str(model), **settings | config)
    executor = make_executor(chosen, lambda text: None)
    try:
        yield engine_over(executor, chosen, poison=poison, block_seed=block_seed, grammars=grammars)
    finally:
        executor.shutdown()


def engine_over(
    executor: UniProcExecutor,
    config: EngineConfig,
    *,
    poison: bool = False,
    block_seed: int | None = None,
    grammars: Grammars | None = None,
    compute_forced_tokens: bool = True,
) -> Engine:
    """A new core for an executor, which must be idle and may have run another core before."""
    order = None
    if block_seed is not None:
        num_blocks = executor.started.cache_groups.num_blocks
        order = random.Random(block_seed).sample(range(num_blocks), num_blocks)
    watched = Watched(executor, poison=poison)
    manager = KVCacheManager(
        executor.started.cache_groups,
        hash_block=hash_block
        if config.enable_prefix_caching and not executor.started.model_config.is_encoder
        else None,
        root_hash=root_hash(config.model, ""),
        checkpoint_positions=checkpoint_positions,
        block_order=order,
        host=executor.started.host_tier,
        mover=executor.started.mover,
        has_disk=config.kv_tiers.kv_disk_path is not None,
        has_sources=config.kv_tiers.kv_transfer_address is not None,
    )
    scheduler = Scheduler(
        replace(
            scheduler_config(config, executor.started),
            compute_forced_tokens=compute_forced_tokens,
            measures_drafts=False,  # which depends on time
        ),
        manager,
        grammars=grammars,
        loras=make_loras(config, executor),
        media=make_media(
            config,
            executor.started.model_config.images,
            executor.started.model_config.audios,
            manager.encoder_blocks,
        ),
    )
    core = EngineCore(scheduler, watched)
    if executor.started.mover is not None:
        executor.started.mover.listen(core.take_from_mover)
    return Engine(core, executor, watched)


def request(
    request_id: str, prompt: Sequence[int], params: SamplingParams, *, resumed: Sequence[int] = ()
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        resumed_token_ids=list(resumed),
        arrival_time=0.0,
    )


def pooled(request_id: str, prompt: Sequence[int], params: PoolingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(),
        pooling_params=params,
    )


def run(engine: Engine, requests: Sequence[EngineCoreRequest], *, seconds: float = DEADLINE) -> dict[str, Result]:
    """Submit all requests, step until they are finished, and check the core after every step."""
    results = {wanted.request_id: Result() for wanted in requests}
    for wanted in requests:
        engine.core.submit(wanted)
    deadline = time.monotonic() + seconds
    while engine.core.has_unfinished_requests() or any(each.finish_reason is None for each in results.values()):
        assert time.monotonic() < deadline, "the engine does not finish"
        engine.core.wait_for_work(timeout=1.0)  # while grammars are compiled
        outputs = engine.core.step()
        engine.core.check_integrity()
        if outputs is None:
            continue
        assert not outputs.rejections, outputs.rejections
        for request_id, token_id in zip(outputs.plain.request_ids, outputs.plain.token_ids, strict=True):
            results[request_id].token_ids.append(token_id)
        for output in outputs.outputs:
            result = results[output.request_id]
            result.token_ids += output.new_token_ids
            result.logprobs += output.logprobs
            result.prompt_logprobs += output.prompt_logprobs
            result.pooled, result.num_pooled_rows = output.pooled, output.num_pooled_rows
            result.finish_reason = output.finish_reason or result.finish_reason
            result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens or 0)
    return results


def tokens(results: Mapping[str, Result]) -> dict[str, list[int]]:
    return {name: result.token_ids for name, result in results.items()}
