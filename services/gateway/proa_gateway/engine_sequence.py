"""EngineSequence: what a generation request has for each of its requests to engines."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from proa.contract import EngineCoreOutput, EventType
from proa_gateway.deltas import FinishName
from proa_gateway.errors import GatewayError


class EngineSequence(Protocol):
    """Receives the outputs of one engine request. After a failover the next engine's output continues the same one."""

    @property
    def received(self) -> Sequence[int]:
        """All output token ids from the engine, so that another engine can resume after them."""
        ...

    @property
    def num_tokens(self) -> int:
        """Output tokens for the usage."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens from the engine's prefix cache."""
        ...

    @property
    def times(self) -> Mapping[EventType, float]:
        """When each of these happened first, by the engine's clock in Unix seconds."""
        ...

    @property
    def finish_reason(self) -> FinishName | None: ...

    def token(self, token_id: int) -> None: ...

    def output(self, output: EngineCoreOutput) -> None: ...

    def failed(self, error: GatewayError, *, retryable: bool) -> None: ...


class SequenceListener(Protocol):
    """Is notified when a sequence starts, ends or fails."""

    def started(self, sequence: EngineSequence) -> None:
        """The engine sent the first output."""

    def ended(self, sequence: EngineSequence) -> None:
        """The output is complete. After a stop string, and for a sink that is satisfied, the engine still runs the
        request: abort it."""

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None: ...
