"""LogprobColumns: the log probabilities of a prompt's tokens, in columns of 4 bytes."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from proa.contract import TokenLogprobs


class LogprobColumns(Sequence[TokenLogprobs]):
    """Takes 16 bytes a token and 8 for each of its alternatives. Objects take 200 and 60, and a request may have a
    million. Values are those of the message, which has float32 too; an item is made whenever it is asked for."""

    __slots__ = ("_ends", "_ids", "_logprobs", "_ranks", "_top_ids", "_top_logprobs")

    def __init__(self, entries: Iterable[TokenLogprobs] = ()) -> None:
        self._ids, self._logprobs, self._ranks = array("I"), array("f"), array("I")
        self._top_ids, self._top_logprobs = array("I"), array("f")
        self._ends = array("I")  # of each token's alternatives
        self.extend(entries)

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            self._ids.append(entry.token_id)
            self._logprobs.append(entry.logprob)
            self._ranks.append(entry.rank)
            self._top_ids.extend(entry.top_token_ids)
            self._top_logprobs.extend(entry.top_logprobs)
            self._ends.append(len(self._top_ids))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(self._item, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> "LogprobColumns": ...

    def __getitem__(self, index: int | slice) -> "TokenLogprobs | LogprobColumns":
        if isinstance(index, slice):
            return LogprobColumns(map(self._item, range(*index.indices(len(self)))))
        return self._item(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogprobColumns) and list(self) == list(other)

    def _item(self, index: int) -> TokenLogprobs:
        tops = slice(self._ends[index - 1] if index else 0, self._ends[index])
        return TokenLogprobs(
            self._ids[index],
            self._logprobs[index],
            self._ranks[index],
            self._top_ids[tops].tolist(),
            self._top_logprobs[tops].tolist(),
        )
