"""Requests with `prefill_only`: they compute and cache a prompt's blocks for another engine, and generate nothing."""

from collections.abc import Sequence
from dataclasses import replace

from proa.contract import EngineCoreOutput, EngineCoreRequest, SamplingParams
from proa_engine.core.admission.request_table import RequestTable
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.outputs import make_output
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.types import RowOutput


class PrefillRequest(Request):
    """A request that computes the full blocks before its last token. Resumed tokens count as its prompt's.

    The last token is never computed, so no step samples, and workers need not know this class. The request finishes
    when the result of its last step arrives. Its sampling parameters have no effect.
    """

    __slots__ = ("_block_size", "_num_in_flight")

    def __init__(self, request: EngineCoreRequest, *, order: tuple[int, ...], block_size: int) -> None:
        num_tokens = len(request.prompt_token_ids) + len(request.resumed_token_ids)
        request = replace(request, sampling_params=SamplingParams(max_tokens=None))
        super().__init__(request, order=order, max_num_tokens=num_tokens, eos_token_ids=frozenset())
        self._block_size = block_size
        self._num_in_flight = 0  # steps

    @property
    def num_tokens_to_cache(self) -> int:
        """Tokens of the blocks that are cached when the request has finished."""
        return self._end // self._block_size * self._block_size

    @property
    def num_uncomputed_tokens(self) -> int:
        return self._end - self.num_computed_tokens

    def schedule(self, num_tokens: int) -> None:
        super().schedule(num_tokens)
        self._num_in_flight += 1

    def schedule_decode(self) -> bool:
        """Return False: what is left is at most a chunk."""
        return False

    def append_row(self, row: RowOutput, now: float) -> Sequence[int]:
        """Finish if the row is that of the last step. A preempted request is computed again: its blocks may be evicted
        before they are stored."""
        assert not row.sampled_token_ids, f"the last token of {self.request_id!r} was computed"
        self._num_in_flight -= 1
        if self.status is RequestStatus.RUNNING and not self._num_in_flight and not self.num_uncomputed_tokens:
            self.status = RequestStatus.FINISHED_STOPPED
        return ()

    @property
    def _end(self) -> int:
        """Number of tokens to compute: up to the last boundary before the last token, if no image is cut there that
        must be computed as a whole."""
        end = (self.num_tokens - 1) // self._block_size * self._block_size
        return self.media.uncut(end, self.num_tokens)


def finish_cached(
    request: Request, table: RequestTable, kv_cache_manager: KVCacheManager, now: float
) -> EngineCoreOutput | None:
    """Finish a waiting request, and return its output, if it is prefill-only and all its blocks are cached: on the
    device, or in host memory, from where other engines fetch them."""
    if not isinstance(request, PrefillRequest) or not kv_cache_manager.is_cached(request, request.num_tokens_to_cache):
        return None
    before = request.status
    if before is RequestStatus.WAITING:
        kv_cache_manager.record_lookup(request.num_tokens, request.num_tokens_to_cache)
        request.num_cached_tokens = request.num_tokens_to_cache
    request.status = RequestStatus.FINISHED_STOPPED
    table.finish(request, before, now)
    return make_output(request)
