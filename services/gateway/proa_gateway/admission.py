"""Admission: how much may be in the gateway at once. Says no at once rather than let anybody wait without end."""

from proa_gateway.errors import Overloaded


class Admission:
    """Counts output sequences, and the prompt tokens of those without their first output token.

    `admit` and `Ticket.release` stand for a request's beginning and end; nothing here waits.
    """

    def __init__(self, *, max_requests: int, max_queued_tokens: int) -> None:
        self.num_requests = 0
        self.num_queued_tokens = 0
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens

    def admit(self, num_sequences: int) -> "Ticket":
        """Raises `Overloaded`."""
        if self.num_requests + num_sequences > self._max_requests:
            raise Overloaded(f"The server is at its limit of {self._max_requests} concurrent requests.")
        self.num_requests += num_sequences
        return Ticket(self, num_sequences)

    def queue(self, num_tokens: int) -> None:
        """Raises `Overloaded`. One request alone may be over the limit: it would never get in otherwise."""
        if self.num_queued_tokens and self.num_queued_tokens + num_tokens > self._max_queued_tokens:
            raise Overloaded(f"The server is at its limit of {self._max_queued_tokens} queued prompt tokens.")
        self.num_queued_tokens += num_tokens


class Ticket:
    """A request's place. Use as a context manager; `queue` once its prompts' lengths are known."""

    __slots__ = ("_admission", "_num_queued", "_num_sequences")

    def __init__(self, admission: Admission, num_sequences: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences
        self._num_queued = 0

    def queue(self, num_tokens: int) -> None:
        """Takes a place for prompt tokens. Raises `Overloaded`."""
        self._admission.queue(num_tokens)
        self._num_queued += num_tokens

    def started(self, num_tokens: int) -> None:
        """A sequence with this many prompt tokens has its first output token."""
        num_tokens = min(num_tokens, self._num_queued)
        self._admission.num_queued_tokens -= num_tokens
        self._num_queued -= num_tokens

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *exc: object) -> None:
        self.started(self._num_queued)
        self._admission.num_requests -= self._num_sequences
        self._num_sequences = 0
