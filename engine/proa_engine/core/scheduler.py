"""Scheduler: decides how many tokens each request computes in a step.

There are no phases: each step lets every request's `num_computed_tokens` catch up with its tokens, within one token
budget. Prefill, chunked prefill, decode, prefix cache hits and recomputation after preemption all follow this rule.
"""

from collections.abc import Iterable, Mapping, Sequence

from proa.contract import Audio, EngineCoreOutput, EngineCoreRequest, Image, SchedulerStats
from proa_engine.core.admission.prefill import finish_cached
from proa_engine.core.admission.request_admission import Admission, OnReady, RequestAdmission
from proa_engine.core.admission.request_factory import RequestFactory
from proa_engine.core.admission.request_table import RequestTable
from proa_engine.core.admission.validation import LengthLimits
from proa_engine.core.constrained import ConstrainedRequest
from proa_engine.core.counters import CoreCounters, EncoderCounts
from proa_engine.core.grammar import GrammarReady, Grammars, NoGrammars
from proa_engine.core.kv.kv_cache_manager import MISS, Hit, KVCacheManager
from proa_engine.core.loras import Loras
from proa_engine.core.media import Media
from proa_engine.core.outputs import append_plain_tokens, make_output, unsent_prompt_logprobs
from proa_engine.core.pipeline import step_share
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.step_plan import IdColumn, StepPlan
from proa_engine.core.timing.prefill_rate import PrefillRate
from proa_engine.core.timing.step_costs import RowSizes
from proa_engine.core.types import (
    Copies,
    ModelRunnerOutput,
    PlainTokens,
    RowOutput,
    SchedulerOutput,
    StateSteps,
)

NO_BLOCKS: Sequence[Sequence[int]] = ()


class Scheduler:
    """Schedules steps until all requests have finished.

    The first request in the policy's order always makes progress, by preempting all others if necessary. Every accepted
    request fits into the cache alone, so every one finishes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        *,
        grammars: Grammars | None = None,
        loras: Loras | None = None,
        media: Media | None = None,
    ) -> None:
        """`grammars`, `loras` or `media` None: requests with a grammar, an adapter, or images or audio are rejected."""
        self.config = config
        self.grammars: Grammars = grammars or NoGrammars()
        self.loras = loras or Loras()
        media = media or Media()
        self.encoder_cache = media.cache
        self.kv_events = kv_cache_manager.kv_events
        self.tiers = kv_cache_manager.tiers
        self.retention = kv_cache_manager.retention
        self.prefill_rate = PrefillRate()
        self._manager = kv_cache_manager
        self._table = RequestTable(kv_cache_manager, self.loras)
        lengths = LengthLimits(config.max_model_len, kv_cache_manager.groups.capacity)
        self._factory = RequestFactory(config, lengths, kv_cache_manager.groups.block_size)
        self._admission = RequestAdmission(
            config,
            self._table,
            kv_cache_manager,
            self._factory,
            lengths=lengths,
            grammars=self.grammars,
            loras=self.loras,
            media=media,
            prefill_rate=self.prefill_rate,
        )
        # A running request computes at least one token in each step, so the budget limits their number too.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._num_steps = 0
        self._decode_ids, self._plain_ids = IdColumn(), IdColumn()

    @property
    def has_work(self) -> bool:
        """Whether requests are running or waiting to be scheduled, workers have to be notified of finished ones, or
        blocks are to be stored in host memory."""
        return not self._table.is_settled or self.tiers.host.has_stores

    @property
    def has_pending(self) -> bool:
        """Whether requests wait for their grammars, or for blocks from another engine."""
        return bool(self._table.pending)

    @property
    def stats(self) -> SchedulerStats:
        stats = SchedulerStats(
            num_running_reqs=len(self._table.running),
            num_waiting_reqs=self._table.num_waiting,
            num_waiting_tokens=self._table.waiting.num_tokens,
            num_preemptions=self._table.num_preemptions,
            prefill_tokens_per_second=self.prefill_rate.tokens_per_second,
        )
        self._manager.fill_stats(stats)
        return stats

    @property
    def counters(self) -> CoreCounters:
        num_encoded, num_hits = self.encoder_cache.num_encoded, self.encoder_cache.num_hits
        crossed = self._manager.encoder_blocks
        return CoreCounters(
            cache=self._manager.occupancy,
            num_deferred_reqs=self._table.num_deferred,
            num_forced_tokens=self._factory.forced.num_tokens,
            drafts=self._factory.drafts.counts,
            images=EncoderCounts(num_encoded[Image], num_hits[Image]),
            audios=EncoderCounts(num_encoded[Audio] + crossed.num_encoded, num_hits[Audio] + crossed.num_hits),
        )

    def add_request(self, request: EngineCoreRequest, now: float, on_ready: OnReady) -> Admission:
        """Queue a request. Returns a rejection if it cannot be accepted, or its output if it has ended already.

        If its grammar must be compiled first, `on_ready` is called later, from any thread, with the arguments for
        `set_grammar`.
        """
        return self._admission.add(request, now, on_ready)

    def set_grammar(self, request: ConstrainedRequest, ready: GrammarReady, now: float) -> Admission:
        """Queue a request whose grammar is compiled. Returns the same as `add_request`."""
        return self._admission.set_grammar(request, ready, now)

    def queue_fetched(self, requests: Iterable[Request]) -> None:
        """Queue requests that waited for a fetch that has ended, unless they wait for their grammars."""
        for request in requests:
            if request.status is RequestStatus.WAITING_FOR_FETCH:
                self._table.queue_pending(request)

    def abort_all(self, now: float) -> list[EngineCoreOutput]:
        """Finish all unfinished requests and return their last outputs."""
        return self.abort_requests(list(self._table.by_id), now)

    def abort_requests(self, request_ids: Iterable[str], now: float) -> list[EngineCoreOutput]:
        """Finish requests and return their last outputs. Unknown ids are ignored, as the requests may have just
        finished."""
        outputs = []
        for request_id in request_ids:
            request = self._table.by_id.get(request_id)
            if request is not None:
                before, request.status = request.status, RequestStatus.FINISHED_ABORTED
                self._table.finish(request, before, now)
                outputs.append(make_output(request))
        return outputs

    def schedule(self, now: float) -> tuple[SchedulerOutput, list[Request], list[EngineCoreOutput]]:
        """Schedule the next step: running requests first, then waiting ones, in the policy's order.

        Returns the step; the requests of its rows, to be passed to `update_from_output` with the step's result; and the
        outputs of requests that finished without being scheduled.
        """
        host = self.tiers.host
        for request in host.loads.take_ended():
            self._table.queue_loaded(request, now)
        plan = StepPlan(self.config.max_num_batched_tokens, self._table.constrained)
        if self._schedule_running(plan, now):
            self._schedule_waiting(plan, now)
        copies = host.plan()
        states = self._manager.cache_blocks(plan.block_candidates)
        return self._scheduler_output(plan, states, copies), plan.rows, plan.outputs

    def update_from_output(
        self, requests: list[Request], result: ModelRunnerOutput, now: float
    ) -> tuple[list[EngineCoreOutput], PlainTokens]:
        """Append a step's results to `requests`, the requests of its rows, except to those that have finished since."""
        plain, plain_token_ids, others = append_plain_tokens(requests, result)
        outputs = [self._append(request, row, now) for request, row in others]
        return [output for output in outputs if output], PlainTokens(self._plain_ids.of(plain), plain_token_ids)

    def count_step(self, num_rows: int, sizes: RowSizes, seconds: float) -> None:
        """Count the time of a step whose result has been appended."""
        self.prefill_rate.add(sizes.chunks, seconds)
        self._factory.drafts.end_step(num_rows, sizes, seconds)

    def reset_prefix_cache(self, since: float, *, keep_host: bool = False) -> None:
        """Empty the prefix cache and the encoder cache, as after a change of weights at `since`, in Unix seconds.
        `keep_host`: keep the part in host memory."""
        self._manager.reset_prefix_cache(self._table.running, since=since, keep_host=keep_host)
        self.encoder_cache.reset()

    def check_integrity(self) -> None:
        """Raises `AssertionError` if the state is inconsistent. For tests: it takes longer than a step."""
        assert len(self._table.running) <= self._max_running
        self._table.check_integrity()
        held = [request.media.held for request in self._table.running]
        self.encoder_cache.check_integrity([image_hash for image_hash in held if image_hash is not None])

    def _append(self, request: Request, row: RowOutput, now: float) -> EngineCoreOutput | None:
        """Append a row's result. Returns the output to send, if any."""
        if request.is_finished:
            return None
        before = request.status
        new_ids = request.append_row(row, now)
        prompt_logprobs = unsent_prompt_logprobs(request, row) if row.prompt_logprobs else ()
        if request.status is not before:
            self._table.finish(request, before, now)
        if not (new_ids or prompt_logprobs or request.is_finished):
            return None
        output = make_output(request, new_ids)
        output.logprobs, output.prompt_logprobs = row.logprobs[: len(new_ids)], prompt_logprobs
        return output

    def _schedule_running(self, plan: StepPlan, now: float) -> bool:
        """Schedule running requests. Returns False if one was preempted; then no waiting request may start."""
        running, num_preemptions = self._table.running, self._table.num_preemptions
        num_stages = self.config.pipeline_parallel_size
        requests = enumerate(running) if num_stages == 1 else step_share(running, num_stages)
        for num_before, request in requests:  # preemption during the loop removes from the end of `running`
            if request.schedule_decode():
                plan.decodes.append(request)
                continue
            num_tokens = request.num_uncomputed_tokens
            if num_tokens > 1:  # a chunk leaves one token for each request behind it
                num_tokens = min(num_tokens, plan.budget - (len(running) - num_before - 1))
            num_tokens = request.media.limit(request.num_computed_tokens, num_tokens)
            if num_tokens == 0:
                continue
            num_slots = request.num_computed_tokens + num_tokens
            block_ids = self._grow(request, num_slots, now) if num_slots > request.num_slots else NO_BLOCKS
            if block_ids is None:
                break
            plan.add_known(request, num_tokens, block_ids)
        return self._table.num_preemptions == num_preemptions

    def _schedule_waiting(self, plan: StepPlan, now: float) -> None:
        """Start waiting requests. The first that does not fit blocks those behind it, so that it cannot starve. So does
        a preempted one whose token a step in flight samples, until it is known.

        A request gets blocks for all its known tokens at once, so its prefill is never preempted for lack of blocks of
        its own.
        """
        while self._table.waiting and plan.budget > 0 and len(self._table.running) < self._max_running:
            request, hit = self._next_waiting(plan, now)
            if request is None or request.num_placeholders or not request.fits(plan.budget):
                break
            budget = request.media.limit(hit.num_tokens, plan.budget)
            if budget == 0:
                break
            while (block_ids := self._manager.allocate_slots(request, request.num_slots_to_start, hit)) is None:
                if not self.tiers.host.loads.give_up(request):
                    return
            self._table.start(request, hit.num_tokens, now)
            plan.add_new(request, min(request.num_uncomputed_tokens, budget), block_ids)

    def _next_waiting(self, plan: StepPlan, now: float) -> tuple[Request | None, Hit]:
        """Return the next request that can start, and its hit, after finishing those that need no step, and moving
        those that can load blocks from host memory to the loading ones."""
        while (request := self._table.waiting.peek()) is not None:
            if (output := finish_cached(request, self._table, self._manager, now)) is not None:
                plan.outputs.append(output)
                continue
            hit = self._manager.get_computed_blocks(request)
            num_tokens = self.tiers.host.loads.begin(request, hit.num_tokens)
            if num_tokens == 0:
                return request, hit
            self.tiers.disk.keep(request, hit.num_tokens + num_tokens)
            self._table.wait_for_load(request, num_tokens, now)
        return None, MISS

    def _grow(self, request: Request, num_slots: int, now: float) -> list[list[int]] | None:
        """Extend the request's slots to `num_slots`. Returns None if the request itself had to be preempted.

        To make room, loads for requests that have not started are given up, then the last running requests are
        preempted.
        """
        while (block_ids := self._manager.tables.extend(request, num_slots)) is None:
            if not self.tiers.host.loads.give_up() and self._table.preempt_last(now) is request:
                return None
        return block_ids

    def _scheduler_output(self, plan: StepPlan, states: Mapping[str, StateSteps], copies: Copies) -> SchedulerOutput:
        """Make the step. Finished and preempted ids are sent with the next step that has tokens, or at once if no
        request is left."""
        has_tokens = bool(plan.rows)
        notifies = has_tokens or self._table.is_idle
        finished_ids, preempted_ids = self._table.take_notices() if notifies else ([], [])
        freed_media, encoder_inputs = self.encoder_cache.end_step(has_tokens=has_tokens)
        audios = self._manager.encoder_blocks
        step = SchedulerOutput(
            step=self._num_steps + 1,
            new_requests=plan.new_requests,
            cached_requests=plan.cached_requests,
            decode_request_ids=self._decode_ids.of(plan.decodes),
            num_chunk_tokens=plan.num_drafted_tokens | plan.num_chunk_tokens,
            num_drafted_rows=len(plan.drafted),
            finished_request_ids=finished_ids,
            preempted_request_ids=preempted_ids,
            grammar_rows=plan.grammar_rows() if plan.constrained else [],
            states=states,
            freed_media=freed_media,
            encoder_inputs=encoder_inputs,
            cross_inputs=audios.take_inputs() if audios.inputs else [],
            copies=copies,
        )
        self._num_steps += step.must_run
        return step
