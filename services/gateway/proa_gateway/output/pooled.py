"""PooledOutput: the values that an engine computes from one prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proa.contract import EngineCoreOutput, EventType, FinishReason
from proa_gateway.errors import EngineUnavailable, GatewayError, GenerationFailed
from proa_gateway.output.text import FinishName, SequenceListener

_VALUE_SIZE = 4  # bytes of a float32


@dataclass(frozen=True, slots=True)
class PooledValues:
    """The result of one input. `values`: little-endian float32, row by row."""

    values: bytes
    num_rows: int


class PooledOutput:
    """The `EngineSequence` of a pooled request. `values`: little-endian float32, row by row, once it has ended.

    It has no tokens, so after a failure the next engine computes it from the start.
    """

    received: Sequence[int] = ()
    num_tokens = 0
    reasoning_tokens = None
    times: Mapping[EventType, float] = {}

    def __init__(self, listener: SequenceListener) -> None:
        self._listener = listener
        self.values = b""
        self.num_rows = 0
        self.num_cached_tokens = 0  # of the prompt, once it has ended
        self.finish_reason: FinishName | None = None

    def token(self, token_id: int) -> None:
        """Not called: a pooled request generates no tokens."""

    def output(self, output: EngineCoreOutput) -> None:
        match output.finish_reason:
            case None:
                return
            case FinishReason.ERROR:
                self._listener.failed(self, GenerationFailed(output.error), retryable=False)
            case FinishReason.ABORT:
                self._listener.failed(self, EngineUnavailable("the engine aborted the request"), retryable=True)
            case _ if not output.num_pooled_rows or len(output.pooled) % (_VALUE_SIZE * output.num_pooled_rows):
                self._listener.failed(self, GenerationFailed("the engine sent no values"), retryable=False)
            case _:
                self.values, self.num_rows = output.pooled, output.num_pooled_rows
                self.num_cached_tokens = output.num_cached_tokens or 0
                self._listener.started(self)
                self.finish_reason = "stop"
                self._listener.ended(self)

    def draining(self) -> None:
        """The engine computes what it has begun."""

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        self._listener.failed(self, error, retryable=retryable)
