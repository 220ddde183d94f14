"""StepPlan: builds one step's `SchedulerOutput` while the scheduler decides."""

from proa_engine.core.request import Request
from proa_engine.core.types import CachedRequestData, NewRequestData, SchedulerOutput


class StepPlan:
    """The requests of a step and their numbers of tokens. After `seal`, `requests` are in the order of the rows."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that may still be scheduled
        self.requests: list[Request] = []
        self.filling: list[Request] = []  # those that may fill a block in this step
        self._chunks: list[Request] = []
        self._num_tokens: dict[str, int] = {}
        self._num_chunk_tokens: dict[str, int] = {}
        self._new: list[NewRequestData] = []
        self._cached: list[CachedRequestData] = []

    @property
    def has_tokens(self) -> bool:
        return bool(self._new or self._cached)

    def add_known(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        """Schedule tokens of a request that the workers hold."""
        self._cached.append(CachedRequestData(request.request_id, request.num_computed_tokens, new_block_ids))
        if new_block_ids or num_tokens > 1:
            self.filling.append(request)
        self._add(request, num_tokens)

    def add_new(self, request: Request, num_tokens: int, block_ids: list[int]) -> None:
        """Schedule tokens of a request that the workers do not hold."""
        data = NewRequestData(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=block_ids,
            sampling_params=request.sampling_params,
            trace_headers=request.trace_headers,
        )
        self._new.append(data)
        self.filling.append(request)
        self._add(request, num_tokens)

    def seal(self, step: int, finished_request_ids: list[str], preempted_request_ids: list[str]) -> SchedulerOutput:
        """The step for the executor, with rows of one token first: decodes are computed together."""
        self.requests += self._chunks
        self._num_tokens.update(self._num_chunk_tokens)
        return SchedulerOutput(
            step=step,
            new_requests=self._new,
            cached_requests=self._cached,
            num_scheduled_tokens=self._num_tokens,
            total_num_scheduled_tokens=sum(self._num_tokens.values()),
            finished_request_ids=finished_request_ids,
            preempted_request_ids=preempted_request_ids,
        )

    def _add(self, request: Request, num_tokens: int) -> None:
        self.budget -= num_tokens
        if num_tokens == 1:
            self.requests.append(request)
            self._num_tokens[request.request_id] = 1
        else:
            self._chunks.append(request)
            self._num_chunk_tokens[request.request_id] = num_tokens
        request.schedule(num_tokens)
