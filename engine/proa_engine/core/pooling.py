"""Pooled requests in the core: they end when their whole prompt is computed; their result is numbers, not tokens."""

from collections.abc import Sequence

from proa.contract import EngineCoreRequest
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.types import PooledRows, RowOutput


class PoolingRequest(Request):
    """A request for numbers computed from its prompt.

    The step that computes the prompt's last token counts as having a token in flight, which is never appended or
    computed. So the request stays in the table until the result arrives, and no further step is scheduled for it.
    """

    __slots__ = ("_num_rows", "_parts")

    def __init__(self, request: EngineCoreRequest, *, order: tuple[int, ...], reads_prefix_cache: bool) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        super().__init__(request, order=order, max_num_tokens=num_prompt_tokens + 1, eos_token_ids=frozenset())
        assert request.pooling_params is not None
        self.reads_prefix_cache = reads_prefix_cache
        self._num_rows = num_prompt_tokens if request.pooling_params.task.is_by_token else 1
        self._parts: list[bytes] = []

    @property
    def pooled(self) -> PooledRows | None:
        if self.status is not RequestStatus.FINISHED_STOPPED:
            return None
        return PooledRows(0, self._num_rows, b"".join(self._parts))

    def append_row(self, row: RowOutput, now: float) -> Sequence[int]:
        """Store a step's rows of numbers. A request that was preempted starts again with its first row."""
        if (rows := row.pooled) is not None:
            if rows.first == 0:
                self._parts.clear()
            self._parts.append(rows.values)
            if rows.first + rows.num_rows == self._num_rows:
                self.status = RequestStatus.FINISHED_STOPPED
        return ()


class WholePromptRequest(PoolingRequest):
    """A pooled request whose tokens attend to all others, so that one step computes all of them."""

    __slots__ = ()

    def fits(self, budget: int) -> bool:
        return self.num_prompt_tokens <= budget
