"""GrammarAdmission: holds requests until their grammars are compiled, then queues, finishes or rejects them."""

from collections.abc import Callable
from functools import partial

from proa.contract import EngineCoreOutput, EngineCoreRequest
from proa_engine.core.constrained import ConstrainedRequest
from proa_engine.core.grammar import GrammarReady, Grammars
from proa_engine.core.outputs import make_output
from proa_engine.core.request import RequestStatus
from proa_engine.core.request_table import RequestTable
from proa_engine.core.types import Rejection, RejectionCode

OnReady = Callable[[ConstrainedRequest, GrammarReady], None]
Admission = Rejection | EngineCoreOutput | None  # rejected, ended without a step, or accepted


class GrammarAdmission:
    """`grammars` None: no request may have a grammar."""

    def __init__(self, table: RequestTable, grammars: Grammars | None) -> None:
        self._table = table
        self._grammars = grammars

    def hold(self, made: ConstrainedRequest, request: EngineCoreRequest, now: float, on_ready: OnReady) -> Admission:
        """Add a request as pending, or settle it at once if its grammar is compiled already."""
        assert self._grammars is not None, "check_request refuses grammars that the engine cannot compile"
        self._table.hold(made, now)
        cursor = self._grammars.prepare(request, partial(on_ready, made))
        return None if cursor is None else self.settle(made, GrammarReady(made.request_id, cursor), now)

    def settle(self, request: ConstrainedRequest, ready: GrammarReady, now: float) -> Admission:
        """Queue a pending request, finish it if its resumed tokens complete the grammar, or reject it.

        One that was aborted since is ignored, also if a new request has its id.
        """
        if self._table.pending.get(request.request_id) is not request:
            return None
        if ready.cursor is None:
            self._table.discard(request)
            code: RejectionCode = "resource_exhausted" if ready.retryable else "invalid_argument"
            return Rejection(request.request_id, request.client_index, code, ready.error)
        request.cursor = ready.cursor
        if not ready.cursor.is_complete:
            self._table.release(request)
            return None
        before, request.status = request.status, RequestStatus.FINISHED_COMPLETE
        self._table.retire(request, before, now)
        return make_output(request)
