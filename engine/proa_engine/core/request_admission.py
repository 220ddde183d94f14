"""RequestAdmission: checks new requests, and queues, finishes or rejects them, once their grammars are compiled."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from proa.contract import EngineCoreOutput, EngineCoreRequest, PoolingTask
from proa_engine.core.constrained import ConstrainedRequest, ForcedCounter, can_force
from proa_engine.core.grammar import GrammarReady, Grammars
from proa_engine.core.images import Images
from proa_engine.core.loras import Loras
from proa_engine.core.outputs import make_output
from proa_engine.core.pooling import PoolingRequest, WholePromptRequest
from proa_engine.core.repetition import request_classes
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.request_table import RequestTable
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.speculation import can_speculate
from proa_engine.core.types import Rejection, RejectionCode
from proa_engine.core.validation import LengthLimits

OnReady = Callable[[ConstrainedRequest, GrammarReady], None]
Admission = Rejection | EngineCoreOutput | None  # rejected, ended without a step, or accepted


class RequestAdmission:
    """Adds requests to `table`. `cache_capacity` is in tokens. `grammars` None: requests must have no grammar.

    Requests for the `last_token_tasks` read the prefix cache, as the hidden state of the last token is all they need.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        table: RequestTable,
        *,
        cache_capacity: int,
        eos_token_ids: frozenset[int],
        grammars: Grammars | None,
        loras: Loras,
        images: Images,
        last_token_tasks: frozenset[PoolingTask],
        whole_prompts: bool,
        forced: ForcedCounter,
    ) -> None:
        self._config = config
        self._table = table
        self._lengths = LengthLimits(config.max_model_len, cache_capacity)
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._loras = loras
        self._images = images
        self._last_token_tasks = last_token_tasks
        self._make_pooled = WholePromptRequest if whole_prompts else PoolingRequest
        self._forced = forced if config.compute_forced_tokens and not config.num_speculative_tokens else None
        self._num_added = 0

    def add(self, request: EngineCoreRequest, now: float, on_ready: OnReady) -> Admission:
        """See `Scheduler.add_request`."""
        if (rejection := self._reject(request)) is not None:
            return rejection
        adapter = self._loras.find(request)
        made = self._make_request(request if adapter is None else replace(request, lora_digest=adapter.lora.digest))
        made.lora, made.images = adapter, self._images.of(request)
        if isinstance(made, ConstrainedRequest):
            return self._hold(made, request, now, on_ready)
        self._table.add(made, now)
        return None

    def set_grammar(self, request: ConstrainedRequest, ready: GrammarReady, now: float) -> Admission:
        """Queue a pending request, finish it if its resumed tokens complete the grammar, or reject it.

        One that was aborted since is ignored, also if a new request has its id.
        """
        if self._table.pending.get(request.request_id) is not request:
            return None
        if ready.cursor is None:
            self._table.remove_pending(request)
            code: RejectionCode = "resource_exhausted" if ready.retryable else "invalid_argument"
            return Rejection(request.request_id, request.client_index, code, ready.error)
        request.cursor = ready.cursor
        if not ready.cursor.is_complete:
            self._table.queue_pending(request)
            return None
        before, request.status = request.status, RequestStatus.FINISHED_COMPLETE
        self._table.finish(request, before, now)
        return make_output(request)

    def _reject(self, request: EngineCoreRequest) -> Rejection | None:
        if request.request_id in self._table.by_id:
            return Rejection(request.request_id, request.client_index, "already_exists", "the request id is in use")
        try:
            self._lengths.check(request)
        except ValueError as error:
            return Rejection(request.request_id, request.client_index, "invalid_argument", str(error))
        if request.lora_name and self._loras.find(request) is None:
            message = f"the adapter {request.lora_name!r} is not loaded, or has another content"
            return Rejection(request.request_id, request.client_index, "not_found", message)
        num_waiting = self._table.num_waiting
        if num_waiting >= self._config.max_waiting_requests:
            message = f"the engine's queue is full ({num_waiting} requests wait)"
            return Rejection(request.request_id, request.client_index, "resource_exhausted", message)
        if missing := self._images.missing(request):
            message = f"the engine has not kept {len(missing)} of the request's images; send their pixels"
            return Rejection(request.request_id, request.client_index, "failed_precondition", message, missing)
        return None

    def _make_request(self, request: EngineCoreRequest) -> Request:
        priority = request.priority if self._config.scheduling_policy == "priority" else 0
        is_new = not request.resumed_token_ids  # the client is already reading a request that another engine began
        order = (priority, is_new, self._num_added)
        self._num_added += 1
        if (pooling := request.pooling_params) is not None:
            return self._make_pooled(request, order=order, reads_prefix_cache=pooling.task in self._last_token_tasks)
        limit, eos = self._lengths.max_num_tokens(request), self._eos_token_ids
        plain, constrained, speculating = request_classes(request.sampling_params)
        if request.sampling_params.grammar is not None:
            forced = self._forced if can_force(request.sampling_params) else None
            return constrained(request, order=order, max_num_tokens=limit, eos_token_ids=eos, forced=forced)
        max_drafts = self._config.num_speculative_tokens
        if max_drafts == 0 or not can_speculate(request.sampling_params):
            return plain(request, order=order, max_num_tokens=limit, eos_token_ids=eos)
        return speculating(request, order=order, max_num_tokens=limit, eos_token_ids=eos, max_drafts=max_drafts)

    def _hold(self, made: ConstrainedRequest, request: EngineCoreRequest, now: float, on_ready: OnReady) -> Admission:
        """Add a request as pending, and queue it at once if its grammar is compiled already."""
        assert self._grammars is not None, "check_request refuses grammars that the engine cannot compile"
        self._table.add_pending(made, now)
        cursor = self._grammars.prepare(request, partial(on_ready, made), lambda: not made.is_finished)
        return None if cursor is None else self.set_grammar(made, GrammarReady(made.request_id, cursor), now)
