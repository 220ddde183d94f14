"""RequestAdmission: checks new requests, and queues, finishes or rejects them, once their grammars are compiled and
their blocks are fetched from another engine."""

from collections.abc import Callable
from functools import partial

from proa.contract import EngineCoreOutput, EngineCoreRequest
from proa_engine.core.admission.prefill import PrefillRequest, finish_cached
from proa_engine.core.admission.request_factory import RequestFactory
from proa_engine.core.admission.request_table import RequestTable
from proa_engine.core.admission.validation import LengthLimits
from proa_engine.core.constrained import ConstrainedRequest
from proa_engine.core.grammar import GrammarReady, Grammars
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.core.loras import Loras
from proa_engine.core.media import Media
from proa_engine.core.outputs import make_output
from proa_engine.core.request import RequestStatus
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.timing.prefill_rate import PrefillRate
from proa_engine.core.types import Rejection, RejectionCode

OnReady = Callable[[ConstrainedRequest, GrammarReady], None]
Admission = Rejection | EngineCoreOutput | None  # rejected, ended without a step, or accepted


class RequestAdmission:
    """Adds accepted requests to `table`."""

    def __init__(
        self,
        config: SchedulerConfig,
        table: RequestTable,
        kv_cache_manager: KVCacheManager,
        factory: RequestFactory,
        *,
        lengths: LengthLimits,
        grammars: Grammars,
        loras: Loras,
        media: Media,
        prefill_rate: PrefillRate,
    ) -> None:
        self._max_waiting_requests = config.max_waiting_requests
        self._table = table
        self._manager = kv_cache_manager
        self._tiers = kv_cache_manager.tiers
        self._factory = factory
        self._lengths = lengths
        self._grammars = grammars
        self._loras = loras
        self._media = media
        self._prefill_rate = prefill_rate

    def add(self, request: EngineCoreRequest, now: float, on_ready: OnReady) -> Admission:
        """See `Scheduler.add_request`."""
        if (rejection := self._reject(request)) is not None:
            return rejection
        adapter = self._loras.find(request)
        made = self._factory.make(adapter.named_in(request))
        made.lora, made.media = adapter, self._media.of(request)
        if isinstance(made, PrefillRequest):
            self._tiers.host.store(made)
        rate = self._prefill_rate.tokens_per_second
        is_fetching = self._tiers.fetches.begin(made, request.kv_source, now, rate)
        if isinstance(made, ConstrainedRequest):
            return self._add_constrained(made, request, now, on_ready)
        if is_fetching:
            made.status = RequestStatus.WAITING_FOR_FETCH
            self._table.add_pending(made, now)
            return None
        self._table.add(made, now)
        return finish_cached(made, self._table, self._manager, now)

    def set_grammar(self, request: ConstrainedRequest, ready: GrammarReady, now: float) -> Admission:
        """Queue a pending request, unless its blocks are still fetched; finish it if its resumed tokens complete the
        grammar, or reject it.

        A request that was aborted meanwhile is ignored, even if a new request has its id.
        """
        if self._table.pending.get(request.request_id) is not request:
            return None
        if ready.cursor is None:
            self._table.remove_pending(request)
            code: RejectionCode = "resource_exhausted" if ready.retryable else "invalid_argument"
            return Rejection(request.request_id, request.client_index, code, ready.error)
        request.cursor = ready.cursor
        if not ready.cursor.is_complete:
            if self._tiers.fetches.is_fetching(request):
                request.status = RequestStatus.WAITING_FOR_FETCH
            else:
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
            self._loras.find(request)
        except ValueError as error:
            return Rejection(request.request_id, request.client_index, "invalid_argument", str(error))
        except LoraNotFound as error:
            return Rejection(request.request_id, request.client_index, "not_found", str(error))
        num_waiting = self._table.num_waiting
        if num_waiting >= self._max_waiting_requests:
            message = f"the engine's queue is full ({num_waiting} requests wait)"
            return Rejection(request.request_id, request.client_index, "resource_exhausted", message)
        images, audios = self._media.missing(request.images), self._media.missing(request.audios)
        if images or audios:
            message = f"the engine has not kept {len(images)} of the request's images; send their pixels"
            if not images:
                message = f"the engine has not kept {len(audios)} of the request's audios; send their samples"
            return Rejection(request.request_id, request.client_index, "failed_precondition", message, images, audios)
        return None

    def _add_constrained(
        self, made: ConstrainedRequest, request: EngineCoreRequest, now: float, on_ready: OnReady
    ) -> Admission:
        """Add a request as pending, and queue it at once if its grammar is compiled already."""
        made.status = RequestStatus.WAITING_FOR_GRAMMAR
        self._table.add_pending(made, now)
        cursor = self._grammars.prepare(request, partial(on_ready, made), lambda: not made.is_finished)
        return None if cursor is None else self.set_grammar(made, GrammarReady(made.request_id, cursor), now)
