"""RequestTable: all unfinished requests by state, and the transitions between states.

Each transition also updates the request's blocks, its events and the ids that workers are notified of.
"""

from bisect import bisect_left, insort

from proa.contract import EventType, KvLoad
from proa_engine.core.admission.request_queue import LoraQueue, RequestQueue
from proa_engine.core.constrained import ConstrainedRequest
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.loras import Loras
from proa_engine.core.request import PENDING, Request, RequestStatus


class RequestTable:
    """Running requests hold blocks; waiting ones, preempted ones included, hold none.

    Pending requests wait for their grammars, or for blocks from another engine. They cannot be scheduled and do not
    count as work. Loading requests wait for blocks to be loaded from host memory; they have the status of waiting ones,
    but are not in the queue.

    `running` is sorted by `Request.order`, so the last one is the first to be preempted.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, loras: Loras) -> None:
        self.by_id: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = LoraQueue(loras.slots) if loras.are_enabled else RequestQueue()
        self.loading: set[Request] = set()
        self.pending: dict[str, Request] = {}
        self.constrained: dict[str, ConstrainedRequest] = {}  # running, waiting and loading requests with a grammar
        self.num_preemptions = 0
        self._kv_cache_manager = kv_cache_manager
        self._tiers = kv_cache_manager.tiers
        self._loras = loras
        self._finished_ids: list[str] = []  # ids that workers are not notified of yet
        self._preempted_ids: list[str] = []  # likewise

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting to be scheduled."""
        return len(self.by_id) == len(self.pending)

    @property
    def is_settled(self) -> bool:
        """Whether the table is idle and workers were notified of all requests that finished."""
        return self.is_idle and not (self._finished_ids or self._preempted_ids)

    @property
    def num_waiting(self) -> int:
        """Number of waiting, loading and pending requests."""
        return len(self.waiting) + len(self.loading) + len(self.pending)

    @property
    def num_deferred(self) -> int:
        """Number of requests in `num_waiting` that could not start even with room: they wait for a grammar, an
        adapter's slot, or blocks that are fetched or loaded."""
        return len(self.pending) + len(self.loading) + self.waiting.num_deferred

    def add(self, request: Request, now: float) -> None:
        self.by_id[request.request_id] = request
        request.lora.add_request()
        self.waiting.push(request)
        request.record(EventType.QUEUED, now)

    def add_pending(self, request: Request, now: float) -> None:
        """Add a request that cannot be queued yet; its status says why."""
        self.by_id[request.request_id] = self.pending[request.request_id] = request
        request.lora.add_request()
        request.record(EventType.QUEUED, now)

    def queue_pending(self, request: Request) -> None:
        """Move a pending request to the waiting queue."""
        request.status = RequestStatus.WAITING
        del self.pending[request.request_id]
        if isinstance(request, ConstrainedRequest):
            self.constrained[request.request_id] = request
        self.waiting.push(request)

    def remove_pending(self, request: Request) -> None:
        """Remove a pending request that is rejected."""
        self._tiers.fetches.end(request)
        del self.pending[request.request_id], self.by_id[request.request_id]
        self._loras.remove_request(request)

    def wait_for_load(self, request: Request, num_tokens: int, now: float) -> None:
        """Move the next waiting request to the loading ones, while `num_tokens` of its tokens are loaded."""
        assert self.waiting.peek() is request, "only the next request can be started"
        self.loading.add(self.waiting.pop())
        request.load = KvLoad(now, now, num_tokens)

    def queue_loaded(self, request: Request, now: float) -> None:
        """Move a loading request back to the waiting queue."""
        assert request.load is not None
        request.load.ended = now
        self.loading.remove(request)
        self.waiting.push(request)

    def start(self, request: Request, num_cached_tokens: int, now: float) -> None:
        """Move the next waiting request to running, with `num_cached_tokens` tokens found in the prefix cache."""
        assert self.waiting.peek() is request, "only the next request can be started"
        assert request.num_placeholders == 0, "a preempted request still has a token in flight"
        self.waiting.pop()
        self._tiers.host.loads.end(request)
        request.lora.start(self._loras.slots)
        insort(self.running, request, key=_order)
        request.num_computed_tokens = num_cached_tokens
        if request.status is RequestStatus.PREEMPTED:
            request.record(EventType.RESUMED, now)
        else:
            self._kv_cache_manager.record_lookup(request.num_tokens, num_cached_tokens)
            request.num_cached_tokens = num_cached_tokens
            request.record(EventType.SCHEDULED, now)
        request.status = RequestStatus.RUNNING

    def preempt_last(self, now: float) -> Request:
        """Preempt the last running request: free its blocks. It keeps its tokens, and a token in flight is appended
        later."""
        request = self.running.pop()
        self._kv_cache_manager.free(request)
        request.lora.stop(self._loras.slots)
        request.media.free()
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.waiting.push(request)
        self._preempted_ids.append(request.request_id)
        self.num_preemptions += 1
        request.record(EventType.PREEMPTED, now)
        return request

    def finish(self, request: Request, before: RequestStatus, now: float) -> None:
        """Remove a request that has just finished; `before` is its previous status."""
        if before is RequestStatus.RUNNING:
            del self.running[bisect_left(self.running, request.order, key=_order)]
            self._kv_cache_manager.free(request)
            request.lora.stop(self._loras.slots)
            request.media.free()
            self._finished_ids.append(request.request_id)
        elif before in PENDING:
            self._tiers.fetches.end(request)
            del self.pending[request.request_id]
        else:
            self._tiers.host.loads.end(request)
            if request in self.loading:
                self.loading.remove(request)
            else:
                self.waiting.remove(request)
        del self.by_id[request.request_id]
        self.constrained.pop(request.request_id, None)
        self._loras.remove_request(request)
        request.record(EventType.FINISHED, now)

    def take_notices(self) -> tuple[list[str], list[str]]:
        """Return the ids of requests that finished and that were preempted since the last call, for the workers."""
        notices = self._finished_ids, self._preempted_ids
        self._finished_ids, self._preempted_ids = [], []
        return notices

    def check_integrity(self) -> None:
        """Raises `AssertionError` if requests, queues and blocks are inconsistent."""
        waiting = [*self.waiting.to_list(), *self.loading]
        assert len(waiting) == len(self.waiting) + len(self.loading)
        admitted = {request.request_id: request for request in [*self.running, *waiting]}
        assert admitted | self.pending == self.by_id
        constrained = {key: request for key, request in admitted.items() if isinstance(request, ConstrainedRequest)}
        assert constrained == self.constrained
        assert not [request for request in self.pending.values() if request.status not in PENDING]
        assert not [request for request in self.running if request.status is not RequestStatus.RUNNING]
        assert not [
            request for request in waiting if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        ]
        assert self.running == sorted(self.running, key=_order)
        assert not [request for request in waiting if request.tables or request.states or request.num_computed_tokens]
        assert not [request for request in waiting if request.media.held]
        assert not [
            request for request in self.by_id.values() if not 0 <= request.num_placeholders <= request.max_placeholders
        ]
        self._kv_cache_manager.check_integrity(self.running, list(self.pending.values()))
        self._loras.check_integrity(self.running, self.by_id.values())


def _order(request: Request) -> tuple[int, ...]:
    return request.order
