"""Scheduler: decides how many tokens each request computes in a step. Knows nothing of tensors, text or RPC.

One rule, no phases: every request has `num_computed_tokens`, and each step lets it catch up with its tokens inside one
token budget. Prefill, chunked prefill, decode, cached prefixes and recomputing after preemption are all this.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from proa_engine.core import admission
from proa_engine.core.kv_cache_manager import KVCacheManager
from proa_engine.core.outputs import append_tokens, make_output, unsent_prompt_logprobs
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.request_queue import RequestQueue
from proa_engine.core.step_plan import StepPlan
from proa_engine.core.types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EventType,
    ModelRunnerOutput,
    Rejection,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)

_Logprobs = Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_waiting_requests: int = 4096
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, a prompt and an output, got {self.max_model_len}")


class Scheduler:
    """Holds all unfinished requests: running ones, which own blocks, and waiting ones, which own none.

    `running` is kept in the policy's order, and the last of it is the first to be preempted. So whoever is first
    always gets on, and every request, as it fits into the cache alone, comes to its end.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, *, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = RequestQueue()
        self._eos_token_ids = eos_token_ids
        # A request that runs computes at least one token in each step, so there is budget for all of them.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._num_added = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._finished_ids: list[str] = []  # the workers do not know yet
        self._preempted_ids: list[str] = []  # likewise

    @property
    def has_work(self) -> bool:
        """Requests are unfinished, or workers hold some that ended."""
        return bool(self.requests or self._finished_ids or self._preempted_ids)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_waiting_tokens=self.waiting.num_tokens,
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_queries=self.kv_cache_manager.num_queried_tokens,
            prefix_cache_hits=self.kv_cache_manager.num_hit_tokens,
            num_preemptions=self._num_preemptions,
        )

    def add_request(self, request: EngineCoreRequest, now: float) -> Rejection | None:
        """Queue a request, or say why not."""
        limits = admission.Limits(self.config.max_model_len, self.kv_cache_manager.capacity)
        if request.request_id in self.requests:
            return Rejection(request.request_id, request.client, "already_exists", "the request id is in use")
        if (message := admission.refusal(request, limits)) is not None:
            return Rejection(request.request_id, request.client, "invalid_argument", message)
        if len(self.waiting) >= self.config.max_waiting_requests:
            message = f"the engine's queue is full ({len(self.waiting)} requests wait)"
            return Rejection(request.request_id, request.client, "resource_exhausted", message)
        added = Request(
            request,
            order=(request.priority if self.config.policy == "priority" else 0, self._num_added),
            max_num_tokens=admission.max_num_tokens(request, limits),
            eos_token_ids=self._eos_token_ids,
        )
        self._num_added += 1
        self.requests[added.request_id] = added
        self.waiting.push(added)
        added.record(EventType.QUEUED, now)
        return None

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus, now: float) -> list[EngineCoreOutput]:
        """End requests from outside. Unknown ids are ignored: they may have ended by themselves a moment ago."""
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                before, request.status = request.status, status
                self._retire(request, before, now)
                outputs.append(make_output(request))
        return outputs

    def schedule(self, now: float) -> tuple[SchedulerOutput, list[Request]]:
        """Plan the next step: who runs first, then who waits, in the policy's order.

        Returns the plan and the requests of its rows, which `update_from_output` wants back with the step's result.
        """
        plan = StepPlan(self.config.max_num_batched_tokens)
        if self._schedule_running(plan, now):
            self._schedule_waiting(plan, now)
        output = self._seal(plan)
        for request in plan.filling:
            self.kv_cache_manager.publish(request)
        return output, plan.requests

    def update_from_output(
        self, requests: Sequence[Request], result: ModelRunnerOutput, now: float
    ) -> list[EngineCoreOutput]:
        """Give the `requests` of a step's rows their tokens. Who has finished since then drops them."""
        outputs = []
        has_logprobs = bool(result.logprobs or result.prompt_logprobs)
        for request, token_ids in zip(requests, result.sampled_token_ids, strict=True):
            before = request.status
            if before > RequestStatus.PREEMPTED:
                continue
            new_ids = append_tokens(request, token_ids, now)
            logprobs, prompt_logprobs = _logprobs(request, len(new_ids), result) if has_logprobs else ((), ())
            if request.status is not before:
                self._retire(request, before, now)
            if new_ids or prompt_logprobs:
                outputs.append(make_output(request, new_ids, logprobs, prompt_logprobs))
        return outputs

    def check_integrity(self) -> None:
        """Raises `AssertionError` where requests, queues and blocks disagree. For tests: costs as much as a step."""
        waiting = self.waiting.to_list()
        assert len(waiting) == len(self.waiting)
        assert {r.request_id: r for r in [*self.running, *waiting]} == self.requests
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        assert all(request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for request in waiting)
        assert self.running == sorted(self.running, key=_order)
        assert len(self.running) <= self._max_running
        assert not any(request.blocks or request.num_computed_tokens for request in waiting)
        assert all(0 <= request.num_placeholders <= 2 for request in self.requests.values())
        self.kv_cache_manager.check_integrity(self.running)

    def _schedule_running(self, plan: StepPlan, now: float) -> bool:
        """Plan for who is running. False where memory ran out, so that nobody may join."""
        num_preemptions, block_size = self._num_preemptions, self.kv_cache_manager.block_size
        for num_before, request in enumerate(self.running):  # which gets shorter, at its end, under memory pressure
            num_tokens = request.num_uncomputed_tokens
            if num_tokens > 1:  # a chunk leaves one token for each request behind it
                num_tokens = min(num_tokens, plan.budget - (len(self.running) - num_before - 1))
            if num_tokens == 0:
                continue
            num_slots = request.num_computed_tokens + num_tokens
            block_ids: list[int] | None = []
            if num_slots > len(request.blocks) * block_size:
                block_ids = self._grow(request, num_slots, now)
            if block_ids is None:
                break
            plan.add_known(request, num_tokens, block_ids)
        return self._num_preemptions == num_preemptions

    def _schedule_waiting(self, plan: StepPlan, now: float) -> None:
        """Let waiting requests join. The first that does not fit stops the rest, so that it is not passed for ever.

        A request takes the blocks of all its known tokens when it joins: once begun, its prefill is not thrown away.
        """
        manager = self.kv_cache_manager
        while plan.budget > 0 and len(self.running) < self._max_running:
            request = self.waiting.peek()
            if request is None:
                break
            assert request.num_placeholders == 0, "a preempted request waits for its token in flight"
            computed_blocks = manager.get_computed_blocks(request)
            block_ids = manager.allocate_slots(request, request.num_tokens, computed_blocks)
            if block_ids is None:
                break
            self._start(request, len(computed_blocks) * manager.block_size, now)
            plan.add_new(request, min(request.num_uncomputed_tokens, plan.budget), block_ids)

    def _start(self, request: Request, num_cached_tokens: int, now: float) -> None:
        self.waiting.pop()
        insort(self.running, request, key=_order)
        request.num_computed_tokens = num_cached_tokens
        request.num_prompt_logprobs_received = 0
        if request.status is RequestStatus.PREEMPTED:
            request.record(EventType.RESUMED, now)
        else:
            self.kv_cache_manager.record_lookup(request.num_tokens, num_cached_tokens)
            request.num_cached_tokens = num_cached_tokens
            request.record(EventType.SCHEDULED, now)
        request.status = RequestStatus.RUNNING

    def _grow(self, request: Request, num_slots: int, now: float) -> list[int] | None:
        """Make room for `num_slots` in all, at the expense of who comes last. `None`: it was the request itself."""
        while (block_ids := self.kv_cache_manager.allocate_slots(request, num_slots)) is None:
            victim = self.running.pop()
            self._preempt(victim, now)
            if victim is request:
                return None
        return block_ids

    def _preempt(self, request: Request, now: float) -> None:
        """Take the request's memory. It keeps its tokens, and the one in flight is appended when it arrives."""
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.waiting.push(request)
        self._preempted_ids.append(request.request_id)
        self._num_preemptions += 1
        request.record(EventType.PREEMPTED, now)

    def _retire(self, request: Request, before: RequestStatus, now: float) -> None:
        """Forget a request that has just finished; `before` is the status that it had."""
        if before is RequestStatus.RUNNING:
            del self.running[bisect_left(self.running, request.order, key=_order)]
            self.kv_cache_manager.free(request)
            self._finished_ids.append(request.request_id)
        else:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        request.record(EventType.FINISHED, now)

    def _seal(self, plan: StepPlan) -> SchedulerOutput:
        """The workers are told what ended with the next tokens they compute, or at once when none will follow."""
        finished_ids: list[str] = []
        preempted_ids: list[str] = []
        if plan.has_tokens or not self.requests:
            finished_ids, self._finished_ids = self._finished_ids, finished_ids
            preempted_ids, self._preempted_ids = self._preempted_ids, preempted_ids
        if plan.has_tokens or finished_ids or preempted_ids:
            self._num_steps += 1
        return plan.seal(self._num_steps, finished_ids, preempted_ids)


def _logprobs(request: Request, num_tokens: int, result: ModelRunnerOutput) -> tuple[_Logprobs, _Logprobs]:
    """The step's log probabilities of the request: of the tokens it keeps, and of its prompt."""
    logprobs = result.logprobs.get(request.request_id, ())[:num_tokens]
    return logprobs, unsent_prompt_logprobs(request, result.prompt_logprobs.get(request.request_id, ()))


def _order(request: Request) -> tuple[int, int]:
    return request.order
