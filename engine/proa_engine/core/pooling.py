"""Pooled requests in the core: they end when their whole prompt is computed, with numbers instead of tokens."""

from collections.abc import Iterator, Sequence

from proa.contract import EngineCoreRequest
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.types import ModelRunnerOutput, PooledRows


class PoolingRequest(Request):
    """A request for numbers computed from its prompt.

    What the step of the prompt's last token returns counts as a token in flight, which is never appended or computed.
    So the request stays in the table until the result arrives, and nothing else is scheduled for it.
    """

    __slots__ = ("_parts", "num_rows")

    def __init__(self, request: EngineCoreRequest, *, order: tuple[int, ...], reads_prefix_cache: bool) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        super().__init__(request, order=order, max_num_tokens=num_prompt_tokens + 1, eos_token_ids=frozenset())
        assert request.pooling_params is not None
        self.reads_prefix_cache = reads_prefix_cache
        self.num_rows = num_prompt_tokens if request.pooling_params.task.is_by_token else 1
        self._parts: list[bytes] = []

    @property
    def values(self) -> bytes:
        """The result, once the request has finished."""
        return b"".join(self._parts)

    def append_rows(self, rows: PooledRows) -> bool:
        """Append the rows of the oldest step in flight. Returns whether the request has finished.

        A request that was preempted begins again with its first row.
        """
        if rows.first == 0:
            self._parts.clear()
        self._parts.append(rows.values)
        if rows.first + rows.num_rows < self.num_rows:
            return False
        self.status = RequestStatus.FINISHED_STOPPED
        return True


class WholePromptRequest(PoolingRequest):
    """A pooled request whose tokens attend to all others, so that one step computes all of them."""

    __slots__ = ()

    def fits(self, budget: int) -> bool:
        return self.num_prompt_tokens <= budget


def finish_pooled(
    requests: Sequence[Request], result: ModelRunnerOutput
) -> Iterator[tuple[PoolingRequest, RequestStatus]]:
    """Give a step's rows to their requests. Yields those that finish, each with its status before."""
    if not result.pooled:
        return
    for request in requests:
        rows = result.pooled.get(request.request_id)
        if rows is None or request.is_finished:
            continue
        assert isinstance(request, PoolingRequest)
        before = request.status
        if request.append_rows(rows):
            yield request, before
