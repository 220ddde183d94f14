"""Plain tokens on their way from the core to the sessions: split by stream, then named by handles.

Both are computed once and reused for as long as the core's list of request ids is the same object.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress

from proa_engine.core.types import PlainTokens

Select = Callable[[Sequence[int]], Sequence[int]]


class StreamShares:
    """Splits each step's plain tokens by stream."""

    def __init__(self, stream_ids: Mapping[str, int]) -> None:
        """`stream_ids`: by request id; read whenever the request ids change."""
        self._stream_ids = stream_ids
        self._request_ids: Sequence[str] = ()
        self._shares: list[tuple[int, Sequence[str], Select]] = []

    def split(self, tokens: PlainTokens) -> Iterator[tuple[int, PlainTokens]]:
        """Each stream's id and share. Tokens of requests of no stream are dropped."""
        if tokens.request_ids is not self._request_ids:
            self._request_ids = tokens.request_ids
            self._shares = self._split_ids(tokens.request_ids)
        for stream_id, request_ids, select in self._shares:
            yield stream_id, PlainTokens(request_ids, select(tokens.token_ids))

    def _split_ids(self, request_ids: Sequence[str]) -> list[tuple[int, Sequence[str], Select]]:
        owners = list(map(self._stream_ids.get, request_ids))
        if len(set(owners)) == 1 and owners[0] is not None:
            return [(owners[0], request_ids, _all)]
        masks: defaultdict[int, list[bool]] = defaultdict(lambda: [False] * len(owners))
        for position, stream_id in enumerate(owners):
            if stream_id is not None:
                masks[stream_id][position] = True
        return [(stream_id, list(compress(request_ids, mask)), _masked(mask)) for stream_id, mask in masks.items()]


class HandleColumn:
    """The handles of `request_ids`, those of requests without one left out."""

    def __init__(self, request_ids: Sequence[str], handles: Mapping[str, int]) -> None:
        found = [handles.get(request_id) for request_id in request_ids]
        mask = [handle is not None for handle in found]
        self.request_ids = request_ids
        self.handles = array("I", [handle for handle in found if handle is not None])
        self.select: Select = _all if all(mask) else _masked(mask)  # the tokens of `handles`


def _all(token_ids: Sequence[int]) -> Sequence[int]:
    return token_ids


def _masked(mask: Sequence[bool]) -> Select:
    return lambda token_ids: list(compress(token_ids, mask))
