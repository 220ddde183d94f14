"""A session's unsent outputs, merged into one message; plain tokens are split by stream, then named by handles.

Shares and handles of plain tokens are computed once and reused for as long as the core's list of request ids is the
same object.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import TypeVar

from proa.contract import EngineCoreOutput, EngineCoreOutputs
from proa_engine.core.types import PlainTokens

Select = Callable[[Sequence[int]], Sequence[int]]

# Sizes in memory, with their numbers' objects. On the wire they are up to twelve times smaller.
PLAIN_BYTES = 8  # in arrays
OUTPUT_BYTES = 400
TOKEN_BYTES = 40
EVENT_BYTES = 120
LOGPROB_BYTES = 320
TOP_LOGPROB_BYTES = 72

T = TypeVar("T")


class StreamShares:
    """Splits each step's plain tokens by stream."""

    def __init__(self, stream_ids: Mapping[str, int]) -> None:
        """`stream_ids`: by request id; read whenever the request ids change."""
        self._stream_ids = stream_ids
        self._request_ids: Sequence[str] = ()
        self._shares: list[tuple[int, Sequence[str], Select]] = []

    def split(self, tokens: PlainTokens) -> Iterator[tuple[int, PlainTokens]]:
        """Yield each stream's id and its share of `tokens`. Tokens of requests without a stream are dropped."""
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
        mask = [request_id in handles for request_id in request_ids]
        self.request_ids = request_ids
        self.handles = array("I", map(handles.__getitem__, compress(request_ids, mask)))
        self.select: Select = _all if all(mask) else _masked(mask)  # the tokens of `handles`


def _all(token_ids: Sequence[int]) -> Sequence[int]:
    return token_ids


def _masked(mask: Sequence[bool]) -> Select:
    return lambda token_ids: list(compress(token_ids, mask))


class PendingOutputs:
    """Takes ownership of the outputs added: later ones are merged into them in place."""

    def __init__(self) -> None:
        self._plain_handles = array("I")
        self._plain_token_ids = array("I")
        self._outputs: dict[int, EngineCoreOutput] = {}  # by handle
        self.num_bytes = 0  # that the outputs hold, without pooled values
        self.num_pooled_bytes = 0

    def extend(self, outputs: Iterable[tuple[int, EngineCoreOutput]]) -> list[int]:
        """Add one step's outputs, given with their handles. Returns the handles of finished requests."""
        finished = list[int]()
        for handle, output in outputs:
            if is_plain(output):
                self.extend_plain(array("I", (handle,)), output.new_token_ids)
                continue
            self._add_entry(handle, output)
            if output.is_finished:
                finished.append(handle)
        return finished

    def extend_plain(self, handles: "array[int]", token_ids: Sequence[int]) -> None:
        """Add one step's plain tokens."""
        self.num_bytes += PLAIN_BYTES * len(handles)
        if not self._outputs:
            self._plain_handles.extend(handles)
            self._plain_token_ids.extend(token_ids)
            return
        for handle, token_id in zip(handles, token_ids, strict=True):
            if handle in self._outputs:
                entry = self._outputs[handle]
                entry.new_token_ids = _join(entry.new_token_ids, (token_id,))
            else:
                self._plain_handles.append(handle)
                self._plain_token_ids.append(token_id)

    def take(self) -> EngineCoreOutputs:
        """Return everything as one message, without statistics, and start again from nothing."""
        outputs = EngineCoreOutputs(
            outputs=list(self._outputs.values()),
            plain_handles=self._plain_handles,
            plain_token_ids=self._plain_token_ids,
        )
        self._plain_handles, self._plain_token_ids, self._outputs = array("I"), array("I"), {}
        self.num_bytes = self.num_pooled_bytes = 0
        return outputs

    def _add_entry(self, handle: int, output: EngineCoreOutput) -> None:
        if handle in self._outputs:
            merge_output(self._outputs[handle], output)
        else:
            output.handle, output.request_id = handle, ""
            self._outputs[handle] = output
            self.num_bytes += OUTPUT_BYTES
        self.num_bytes += _held_bytes(output)
        self.num_pooled_bytes += len(output.pooled)


def is_plain(output: EngineCoreOutput) -> bool:
    """Whether the output is one token and nothing else."""
    return (
        len(output.new_token_ids) == 1
        and not output.is_finished
        and not output.logprobs
        and not output.events
        and not output.prompt_logprobs
    )


def merge_output(earlier: EngineCoreOutput, later: EngineCoreOutput) -> None:
    """Merge `later` into `earlier`: deltas are joined, totals and the finish are those of `later`."""
    earlier.new_token_ids = _join(earlier.new_token_ids, later.new_token_ids)
    earlier.logprobs = _join(earlier.logprobs, later.logprobs)
    earlier.prompt_logprobs = _join(earlier.prompt_logprobs, later.prompt_logprobs)
    earlier.events = _join(earlier.events, later.events)
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
    earlier.num_prompt_tokens = later.num_prompt_tokens or earlier.num_prompt_tokens
    earlier.num_output_tokens = later.num_output_tokens or earlier.num_output_tokens
    if later.num_cached_tokens is not None:
        earlier.num_cached_tokens = later.num_cached_tokens
    earlier.error = later.error
    earlier.pooled, earlier.num_pooled_rows = later.pooled, later.num_pooled_rows


def _join(earlier: Sequence[T], later: Sequence[T]) -> Sequence[T]:
    """Extend a list in place, so that n merges take linear time."""
    if not later:
        return earlier
    joined = earlier if isinstance(earlier, list) else list(earlier)
    joined.extend(later)
    return joined


def _held_bytes(output: EngineCoreOutput) -> int:
    """What its lists hold."""
    size = TOKEN_BYTES * len(output.new_token_ids) + EVENT_BYTES * len(output.events)
    for entry in output.logprobs:
        size += LOGPROB_BYTES + TOP_LOGPROB_BYTES * len(entry.top_token_ids)
    for entry in output.prompt_logprobs:
        size += LOGPROB_BYTES + TOP_LOGPROB_BYTES * len(entry.top_token_ids)
    return size
