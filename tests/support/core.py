"""An engine core over a fake executor, with the outputs that it made. For tests of the core."""

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from hashlib import sha256
from typing import Any, Literal

from proa.blocks import checkpoint_positions
from proa.contract import (
    EngineCoreOutput,
    EngineCoreRequest,
    Event,
    EventType,
    FinishReason,
    KvSource,
    Lora,
    PoolingParams,
    PoolingTask,
    SamplingParams,
)
from proa_engine.core.encoder_cache import EncoderCache
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.executor import Executor
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.kv.no_host_tier import NoHostTier
from proa_engine.core.kv.prefix_cache import BlockHashFunction
from proa_engine.core.kv_events import KvEventBatch
from proa_engine.core.loras import Loras
from proa_engine.core.media import CrossAttention, Media, MediaStore
from proa_engine.core.operations import LoadLora, ResetPrefixCache
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.types import PlainTokens, Rejection
from proa_engine.engine_parts import untraced
from support.fake_audio import cross_tokens_of
from support.fake_disk import FakeDisk
from support.fake_executor import LAST_TOKEN_TASKS, FakeExecutor, generate, pool
from support.fake_grammar import FakeGrammars, compiles, generate_constrained
from support.fake_host import FakeHost
from support.fake_images import FakeEncodings, seen
from support.fake_mover import FakeMover

EOS = frozenset({0})


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[bytes | str]) -> bytes:
    return sha256(repr((parent, list(token_ids), list(extra_keys))).encode()).digest()


def make_request(
    request_id: str = "a",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    priority: int = 0,
    cache_salt: str = "",
    resumed: Sequence[int] = (),
    client_index: int = 0,
    lora_name: str = "",
    lora_digest: str = "",
    **params: Any,
) -> EngineCoreRequest:
    """A request that ends at `max_tokens` unless the test says otherwise."""
    params = {"max_tokens": 8, "ignore_eos": True, **params}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**params),
        priority=priority,
        cache_salt=cache_salt,
        resumed_token_ids=list(resumed),
        arrival_time=0.0,
        client_index=client_index,
        lora_name=lora_name,
        lora_digest=lora_digest,
    )


def make_pooled(
    request_id: str = "a",
    prompt: Sequence[int] = (1, 2, 3),
    task: PoolingTask = PoolingTask.EMBED,
    *,
    priority: int = 0,
    cache_salt: str = "",
) -> EngineCoreRequest:
    score_token_ids = (1, 2) if task is PoolingTask.TOKEN_LOGPROBS else ()
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(),
        pooling_params=PoolingParams(task=task, score_token_ids=score_token_ids),
        priority=priority,
        cache_salt=cache_salt,
    )


class Clock:
    """A clock that advances by one second with each call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class CoreRun:
    """Runs a core, checks its integrity after every step, and keeps its outputs."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        windows: tuple[int, ...] = (),
        num_state_slots: int = 0,
        cross_tokens: int = 0,
        checkpoint_interval: int = 0,
        min_junction: int = 4,
        max_model_len: int = 128,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_waiting_requests: int = 1000,
        async_scheduling: bool = True,
        num_stages: int = 1,
        policy: Literal["fcfs", "priority"] = "fcfs",
        enable_prefix_caching: bool = True,
        eos_token_ids: frozenset[int] = EOS,
        num_speculative_tokens: int = 0,
        draft_schedule: tuple[tuple[int, int], ...] = (),
        measures_drafts: bool = False,
        compute_forced_tokens: bool = True,
        accept: Callable[[int], int] | None = None,
        block_order: Sequence[int] | None = None,
        whole_prompts: bool = False,
        clock: Callable[[], float] | None = None,
        trace_steps: Callable[[Executor], Executor] = untraced,
        max_loras: int = 0,
        max_cpu_loras: int = 0,
        encoder_cache_size: int = 0,
        attends_within: bool = False,
        image_store_bytes: int = 10_000,
        hash_block: BlockHashFunction = hash_block,
        host: HostTierConfig | None = None,
        fetches: random.Random | None = None,
        disk: FakeDisk | None = None,
    ) -> None:
        """`fetches`: requests at random have another engine as source, which has all that this one ever stored."""
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            num_state_slots=num_state_slots,
            cross_budget=max_num_batched_tokens if cross_tokens else 0,
            max_num_seqs=max_num_seqs,
            max_in_flight=num_stages if num_stages > 1 else 1 + async_scheduling,
            num_stages=num_stages,
            accept=accept,
            max_loras=max_loras,
            encodings=FakeEncodings(encoder_cache_size, max_num_batched_tokens, attends_within=attends_within),
            host=None if host is None else FakeHost(host.num_pages, host.num_states),
        )
        self.groups = CacheGroups(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            num_state_slots=num_state_slots,
            cross_tokens=cross_tokens,
            checkpoint_interval=checkpoint_interval,
            min_junction=min_junction,
            max_step_tokens=max(max_num_batched_tokens, 2 * (1 + num_speculative_tokens)),
        )
        self.mover: FakeMover | None = None
        if self.executor.host is not None and fetches is not None and enable_prefix_caching:
            self.mover = FakeMover(self.executor.host, fetches, disk)
        self._fetches = fetches
        self.manager = KVCacheManager(
            self.groups,
            hash_block=hash_block if enable_prefix_caching else None,
            root_hash=b"root",
            checkpoint_positions=checkpoint_positions,
            block_order=block_order,
            host=host,
            mover=self.mover,
            has_disk=disk is not None,
        )
        config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting_requests=max_waiting_requests,
            scheduling_policy=policy,
            async_scheduling=async_scheduling,
            pipeline_parallel_size=num_stages,
            num_speculative_tokens=num_speculative_tokens,
            draft_schedule=draft_schedule,
            measures_drafts=measures_drafts,
            compute_forced_tokens=compute_forced_tokens,
            eos_token_ids=eos_token_ids,
            last_token_tasks=LAST_TOKEN_TASKS,
            whole_prompts=whole_prompts,
        )
        cross = CrossAttention(self.manager.encoder_blocks, cross_tokens_of, max_num_batched_tokens)
        self.grammars = FakeGrammars(eos_token_ids)
        self.loras = Loras(self.executor, max_loras=max_loras, max_cpu_loras=max_cpu_loras) if max_loras else Loras()
        scheduler = Scheduler(
            config,
            self.manager,
            grammars=self.grammars,
            loras=self.loras,
            media=Media(
                MediaStore(image_store_bytes),
                EncoderCache(encoder_cache_size, max_num_batched_tokens),
                attends_within=attends_within,
                cross=cross if cross_tokens else None,
            ),
        )
        self.core = EngineCore(scheduler, trace_steps(self.executor), clock=clock or Clock())
        if self.mover is not None:
            self.mover.listen(self.core.take_from_mover)
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.outputs: dict[str, list[EngineCoreOutput]] = {}  # plain tokens included
        self.plain: list[PlainTokens] = []
        self.rejections: list[Rejection] = []
        self.kv_events: list[KvEventBatch] = []
        self.lora_sets: list[list[str]] = []  # names of the loaded adapters, after each change

    @property
    def cached_hashes(self) -> set[bytes]:
        """The hashes in the prefix cache."""
        return set(self.manager._cache.cached_blocks)

    @property
    def checkpoints(self) -> set[bytes]:
        """The checkpoints in the prefix cache."""
        return set(self.manager._cache.checkpoints)

    @property
    def hashes_in_host(self) -> tuple[set[bytes], set[bytes]]:
        """The hashes and the checkpoints of the host tier."""
        host = self.manager.tiers.host
        if isinstance(host, NoHostTier):
            return set(), set()
        return set(host.pools.cache.cached_blocks), set(host.pools.cache.checkpoints)

    def submit(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            if self._fetches is not None and self._fetches.random() < 0.7:
                addresses = (self._fetches.choice(["peer:1", "peer:1", "peer:2"]),)
                source = KvSource(addresses=addresses, wait_ms=self._fetches.choice([0, 0, 60_000]))
                request = replace(request, kv_source=source)
            if self.executor.accept is not None and compiles(request.sampling_params.grammar):
                output, _ = generate_constrained(request, self.eos_token_ids, self.max_model_len)
                self.executor.outputs[request.request_id] = output
            if request.prompt_embeds:
                self.executor.prompt_embeds[request.request_id] = request.prompt_embeds
            self.core.submit(request)

    def step(self) -> None:
        if self.mover is not None:
            self.mover.advance()
        outputs = self.core.step()
        self.core.check_integrity()
        if outputs is not None:
            self.rejections += outputs.rejections
            if outputs.kv_events is not None:
                self.kv_events.append(outputs.kv_events)
            if outputs.loras is not None:
                self.lora_sets.append([lora.name for lora in outputs.loras.loras])
            self.plain.append(outputs.plain)
            plain = zip(outputs.plain.request_ids, outputs.plain.token_ids, strict=True)
            tokens = [
                EngineCoreOutput(request_id=request_id, new_token_ids=[token_id]) for request_id, token_id in plain
            ]
            for output in [*outputs.outputs, *tokens]:
                self.outputs.setdefault(output.request_id, []).append(output)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def finish(self, max_steps: int = 6000) -> None:
        """Compile grammars and step until no request is unfinished, and check that nothing has leaked."""
        for _ in range(max_steps):
            if not self.core.has_unfinished_requests():
                break
            self.grammars.compile_all()
            if self.mover is not None:
                self.mover.advance(to_end=True)
            self.step()
        assert not self.core.has_unfinished_requests(), f"not finished after {max_steps} steps"
        assert self.core.stats().kv_cache_usage == 0, "blocks have leaked"
        assert not self.executor.rows, "the workers still hold finished requests"

    def tokens(self, request_id: str = "a") -> list[int]:
        return [token_id for output in self.outputs.get(request_id, ()) for token_id in output.new_token_ids]

    def last(self, request_id: str = "a") -> EngineCoreOutput:
        return self.outputs[request_id][-1]

    def finish_reason(self, request_id: str = "a") -> FinishReason | None:
        return self.last(request_id).finish_reason if request_id in self.outputs else None

    def events(self, request_id: str = "a") -> list[Event]:
        return [event for output in self.outputs.get(request_id, ()) for event in output.events]

    def event_types(self, request_id: str = "a") -> list[EventType]:
        return [event.type for event in self.events(request_id)]

    def batches(self) -> list[dict[str, int]]:
        """Each step's tokens by request id, without steps that compute nothing."""
        return [plan.num_scheduled_tokens for plan in self.executor.plans if not plan.is_empty]

    def expected(self, request: EngineCoreRequest) -> list[int]:
        """The fake model's output, however it is scheduled, without resumed tokens."""
        if request.sampling_params.grammar is not None:
            tokens, _ = generate_constrained(request, self.eos_token_ids, self.max_model_len)
            return tokens[len(request.resumed_token_ids) :]
        tokens = generate(
            seen(request.prompt_token_ids, request.media),
            request.sampling_params,
            self.eos_token_ids,
            self.max_model_len,
            request.lora_digest,
        )
        return tokens[len(request.resumed_token_ids) :]

    def reset_prefix_cache(self) -> None:
        """Operate a reset. The device's weights change at the same time."""
        done = self.core.operate(ResetPrefixCache())
        done.add_done_callback(lambda _: self._begin_epoch())

    def _begin_epoch(self) -> None:
        self.executor.weights_epoch += 1

    def load_lora(self, name: str, path: str = "", *, replace: bool = False) -> "Future[Lora]":
        """Load an adapter, whose digest is its path, the name if that is empty."""
        done = self.core.operate(LoadLora(name, path or name, replace))
        self.step()
        if self.executor.lora_reads:
            self.executor.read_lora()
        self.step()
        return done

    def assert_pooled(self, request: EngineCoreRequest) -> None:
        """The request has ended with the fake model's values, in its only output."""
        assert request.pooling_params is not None
        (output,) = self.outputs[request.request_id]
        assert output.finish_reason is FinishReason.STOP
        assert output.pooled == pool(seen(request.prompt_token_ids, request.media), request.pooling_params.task)
        is_by_token = request.pooling_params.task.is_by_token
        assert output.num_pooled_rows == (len(request.prompt_token_ids) if is_by_token else 1)
        assert not output.new_token_ids
        assert output.num_output_tokens == 0

    def assert_complete(self, requests: Iterable[EngineCoreRequest]) -> None:
        for request in requests:
            assert self.tokens(request.request_id) == self.expected(request), request.request_id
