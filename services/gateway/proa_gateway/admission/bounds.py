"""Admission: how much may be in the gateway at once: output sequences, requests that wait, and their prompt tokens.

Says no at once rather than let anybody wait without end; to whom, `FairLimit` decides for all three bounds.
"""

from collections.abc import Callable, Mapping

from proa_gateway.admission.fair_limit import Claim, FairLimit, Stake
from proa_gateway.errors import Overloaded


class Limit(FairLimit["Ticket"]):
    """`name`: as metrics call it. `what`: as clients read it."""

    def __init__(self, most: int, name: str, what: str) -> None:
        super().__init__(most)
        self.name = name
        self._what = what

    def error(self) -> Overloaded:
        return Overloaded(f"The server is at its limit of {self.most} {self._what}.", limit=self.name)


class Admission:
    """`admit` and the end of its ticket stand for a request's beginning and end; nothing here waits."""

    def __init__(self, *, max_requests: int, max_waiting: int, max_queued_tokens: int) -> None:
        self.sequences = Limit(max_requests, "requests", "concurrent requests")
        self.waiting = Limit(max_waiting, "waiting", "waiting requests")
        self.tokens = Limit(max_queued_tokens, "tokens", "queued prompt tokens")

    def admit(self, claim: Claim, num_sequences: int) -> "Ticket":
        """Raises `Overloaded`."""
        return Ticket(self, claim, num_sequences)


class Ticket:
    """One request's stakes. Use as a context manager. While it waits it may lose them all to another request."""

    def __init__(self, admission: Admission, claim: Claim, num_sequences: int) -> None:
        """Raises `Overloaded`."""
        self.claim = claim
        self.num_sequences = num_sequences
        self._admission = admission
        self._stakes: dict[Limit, Stake[Ticket]] = {}
        self._leave: Callable[[Overloaded], None] | None = None
        self._take({admission.sequences: num_sequences})

    def wait(self, leave: Callable[[Overloaded], None], *, num_tokens: int = 0) -> None:
        """Takes a place among those who wait; `leave` is called should another one get it. Raises `Overloaded`."""
        tokens = self._admission.tokens
        # One request alone may be over the limit: it would never get in otherwise.
        self._take({self._admission.waiting: 1, tokens: min(num_tokens, tokens.most)}, waits=True)
        self._leave = leave
        self._admission.sequences.wait(self._stakes[self._admission.sequences])

    def stop_waiting(self) -> None:
        """Its turn has come: nothing is taken from it any more. Harmless where it does not wait."""
        self._leave = None
        for limit in (self._admission.waiting, self._admission.tokens):
            self._give_back(limit)
        if (stake := self._stakes.get(self._admission.sequences)) is not None:
            self._admission.sequences.stop_waiting(stake)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _take(self, amounts: Mapping[Limit, int], *, waits: bool = False) -> None:
        """Everything or nothing."""
        leaving: dict[Ticket, Overloaded] = {}
        for limit, amount in amounts.items():
            givers = limit.givers(self.claim, amount)
            if givers is None:
                raise limit.error()
            leaving |= {giver: limit.error() for giver in givers}
        for giver, error in leaving.items():
            giver._lose(error)
        for limit, amount in amounts.items():
            if amount:
                self._stakes[limit] = limit.add(self, self.claim, amount, waits=waits)

    def _lose(self, error: Overloaded) -> None:
        leave = self._leave
        assert leave is not None
        self._end()
        leave(error)

    def _end(self) -> None:
        self.stop_waiting()
        self._give_back(self._admission.sequences)

    def _give_back(self, limit: Limit) -> None:
        if (stake := self._stakes.pop(limit, None)) is not None:
            limit.remove(stake)
