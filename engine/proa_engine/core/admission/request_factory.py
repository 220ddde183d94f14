"""RequestFactory: makes the core's `Request` from an `EngineCoreRequest`, of the class that its parameters need."""

from proa.contract import EngineCoreRequest
from proa_engine.core.admission.prefill import PrefillRequest
from proa_engine.core.admission.validation import LengthLimits
from proa_engine.core.constrained import ConstrainedRequest, DraftedConstrainedRequest, ForcedCounter, can_force
from proa_engine.core.pooling import PoolingRequest, WholePromptRequest
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.speculation import DraftCounter, SpeculatingRequest, can_speculate
from proa_engine.core.timing.draft_depth import DraftDepth, MeasuredDepth, ScheduledDepth


class _RepetitionRequest(Request):
    """A request with `repetition_detection`: it finishes when its output repeats itself, not before `min_tokens`. Other
    reasons to finish are checked first."""

    __slots__ = ()

    def append_plain_token(self, token_id: int) -> bool:
        """Return False, because any token may be the last."""
        return False

    def append_token(self, token_id: int) -> bool:
        if super().append_token(token_id):
            return True
        params = self.sampling_params
        detection = params.repetition_detection
        assert detection is not None, "the class is chosen by it"
        if self.num_output_tokens < params.min_tokens or not detection.is_met(self.token_ids, self.num_prompt_tokens):
            return False
        self.status = RequestStatus.FINISHED_REPETITION
        return True


class _Constrained(_RepetitionRequest, ConstrainedRequest):
    __slots__ = ()


class _Speculating(_RepetitionRequest, SpeculatingRequest):
    pass


class _DraftedConstrained(_RepetitionRequest, DraftedConstrainedRequest):
    pass


class RequestFactory:
    """Makes requests, which count their forced tokens in `forced` and their draft tokens in `drafts`."""

    def __init__(self, config: SchedulerConfig, lengths: LengthLimits, block_size: int) -> None:
        self.forced, self.drafts = ForcedCounter(), DraftCounter(_draft_depth(config))
        self._config = config
        self._lengths = lengths
        self._block_size = block_size
        self._num_made = 0

    def make(self, request: EngineCoreRequest) -> Request:
        """Make a request. Among requests of equal priority it is ordered behind those made before."""
        config, params = self._config, request.sampling_params
        priority = request.priority if config.scheduling_policy == "priority" else 0
        is_new = not request.resumed_token_ids  # the client is already reading a request that another engine began
        order = (priority, is_new, self._num_made)
        self._num_made += 1
        if (pooling := request.pooling_params) is not None:
            pooled = WholePromptRequest if config.whole_prompts else PoolingRequest
            return pooled(request, order=order, reads_prefix_cache=pooling.task in config.last_token_tasks)
        if request.prefill_only:
            return PrefillRequest(request, order=order, block_size=self._block_size)
        limit, eos = self._lengths.max_num_tokens(request), config.eos_token_ids
        may_repeat = params.repetition_detection is None
        max_drafts = config.num_speculative_tokens if can_speculate(request) else 0
        if params.grammar is not None:
            counts = config.compute_forced_tokens and can_force(params)
            forced = self.forced if counts else None
            if max_drafts:
                drafted = DraftedConstrainedRequest if may_repeat else _DraftedConstrained
                return drafted(
                    request,
                    order=order,
                    max_num_tokens=limit,
                    eos_token_ids=eos,
                    forced=forced,
                    max_drafts=max_drafts,
                    counter=self.drafts,
                )
            constrained = ConstrainedRequest if may_repeat else _Constrained
            return constrained(request, order=order, max_num_tokens=limit, eos_token_ids=eos, forced=forced)
        if max_drafts:
            speculating = SpeculatingRequest if may_repeat else _Speculating
            return speculating(
                request,
                order=order,
                max_num_tokens=limit,
                eos_token_ids=eos,
                max_drafts=max_drafts,
                counter=self.drafts,
            )
        plain = Request if may_repeat else _RepetitionRequest
        return plain(request, order=order, max_num_tokens=limit, eos_token_ids=eos)


def _draft_depth(config: SchedulerConfig) -> DraftDepth:
    if config.measures_drafts and not config.draft_schedule:
        return MeasuredDepth(config.num_speculative_tokens)
    return ScheduledDepth(config.draft_schedule or ((1, config.num_speculative_tokens),))
