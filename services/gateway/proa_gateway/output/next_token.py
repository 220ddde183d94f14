"""NextToken: the log probabilities of the token after one prompt."""

from collections.abc import Mapping, Sequence

from proa.contract import EngineCoreOutput, EventType, FinishReason, TokenLogprobs
from proa_gateway.errors import EngineUnavailable, GatewayError, GenerationFailed, GrammarFailed
from proa_gateway.output.text import FinishName, SequenceListener


class NextToken:
    """The `EngineSequence` of a request for one token. `entry`: its log probabilities, once it has ended.

    The token itself is not used, so it does not count, and after a failure the next engine computes it again.
    """

    received: Sequence[int] = ()
    num_tokens = 0
    reasoning_tokens = None
    times: Mapping[EventType, float] = {}

    def __init__(self, listener: SequenceListener) -> None:
        self._listener = listener
        self.entry: TokenLogprobs | None = None
        self.num_cached_tokens = 0
        self.finish_reason: FinishName | None = None

    def token(self, token_id: int) -> None:
        """Not called: a token with log probabilities comes as an output."""

    def output(self, output: EngineCoreOutput) -> None:
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        if output.logprobs:
            self.entry = output.logprobs[0]
        match output.finish_reason:
            case None:
                return
            case FinishReason.ERROR:
                self._listener.failed(self, GrammarFailed(output.error), retryable=False)
            case FinishReason.ABORT:
                self._listener.failed(self, EngineUnavailable("the engine aborted the request"), retryable=True)
            case _ if self.entry is None:
                self._listener.failed(self, GenerationFailed("the engine sent no log probabilities"), retryable=False)
            case _:
                self._listener.started(self)
                self.finish_reason = "stop"
                self._listener.ended(self)

    def draining(self) -> None:
        """The engine computes what it has begun."""

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        self._listener.failed(self, error, retryable=retryable)
