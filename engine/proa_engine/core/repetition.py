"""Requests whose output ends when it repeats itself."""

from proa.contract import SamplingParams
from proa_engine.core.constrained import ConstrainedRequest
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.speculation import SpeculatingRequest


class _RepetitionRequest(Request):
    """A request with `repetition_detection`. What else ends it comes first, and nothing does before `min_tokens`."""

    __slots__ = ()

    def append_plain_token(self, token_id: int) -> bool:
        """False: each token may be the last."""
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
    __slots__ = ()


def request_classes(
    params: SamplingParams,
) -> tuple[type[Request], type[ConstrainedRequest], type[SpeculatingRequest]]:
    """The classes of a plain request, of one with a grammar and of one with drafts."""
    if params.repetition_detection is None:
        return Request, ConstrainedRequest, SpeculatingRequest
    return _RepetitionRequest, _Constrained, _Speculating
