"""A step's results: copied from the device to the host, then turned into a ModelRunnerOutput.

On CUDA, `AsyncOutput` copies them on a separate stream, so that neither the next step's kernels nor the calling thread
wait for the copy. On a CPU no copy is needed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat

import torch
from torch import Tensor

from proa.contract import TokenLogprobs
from proa_engine.core.types import Drafts, ModelRunnerOutput, PooledRows, RowOutput
from proa_engine.step.sampler import LogprobTensors
from proa_engine.step.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's results, as tensors to be copied to the host."""

    token_ids: Tensor | None  # [samples] int64
    logprobs: LogprobTensors | None
    prompt_logprobs: list[LogprobTensors]  # slices, in order
    drafts: Tensor | None = None  # [sampling rows, 2] int64: numbers of accepted and of proposed draft tokens
    pooled: list[Tensor] = field(default_factory=list)  # [rows, values] float32 of each group of pooled requests


def collect(tensors: StepTensors, inputs: StepInputs) -> ModelRunnerOutput:
    """Make a step's output, in the order of its rows. The tensors must be on the host, their copies complete."""
    token_ids: list[int] = [] if tensors.token_ids is None else tensors.token_ids.tolist()
    has_more = tensors.drafts is not None or tensors.logprobs is not None or inputs.prompt_logprobs is not None
    if len(token_ids) == len(inputs.request_ids) and not has_more:
        return ModelRunnerOutput(plain_token_ids=token_ids)
    others: defaultdict[str, RowOutput] = defaultdict(RowOutput)
    for name, entries, end in _prompt_logprobs(tensors.prompt_logprobs, inputs):
        others[name].prompt_logprobs, others[name].prompt_logprobs_end = entries, end
    for name, pooled in _pooled_rows(tensors.pooled, inputs):
        others[name].pooled = pooled
    ids, logprobs, plain_token_ids = iter(token_ids), _Logprobs(tensors, inputs), list[int]()
    for name, (num_samples, num_kept, drafts) in zip(inputs.request_ids, _samples(tensors, inputs), strict=True):
        sampled = list(islice(ids, num_samples))[:num_kept]
        if drafts is not None:
            others[name].drafts = drafts
        if name in logprobs.num_top:
            others[name].logprobs = logprobs.take(name, num_samples)[:num_kept]
        if num_kept == 1 and name not in others:
            plain_token_ids += sampled
        else:
            others[name].sampled_token_ids = sampled
    return ModelRunnerOutput(plain_token_ids=plain_token_ids, others=dict(others))


def _samples(tensors: StepTensors, inputs: StepInputs) -> Iterator[tuple[int, int, Drafts | None]]:
    """Yield, for each row, its number of samples, how many of them to keep, and its drafts.

    A row with drafts has a sample after each draft. Samples behind the accepted drafts and one more are discarded.
    """
    if tensors.drafts is None:
        for is_sampled in inputs.is_sampled:
            yield int(is_sampled), int(is_sampled), None
        return
    assert inputs.drafts is not None
    counts: Iterator[list[int]] = iter(tensors.drafts.tolist())
    for is_sampled, planned in zip(inputs.is_sampled, inputs.drafts.num_planned, strict=True):
        if is_sampled:
            accepted, proposed = next(counts)
            yield planned + 1, accepted + 1, Drafts(planned, proposed) if planned else None
        else:
            yield 0, 0, None


def _pooled_rows(parts: list[Tensor], inputs: StepInputs) -> Iterator[tuple[str, PooledRows]]:
    groups = () if inputs.pooling is None else inputs.pooling.groups
    for values, group in zip(parts, groups, strict=True):
        rows, end = values.numpy().astype("<f4", copy=False), 0
        for request_id, num_before, num_rows, num_values in group.requests:
            start, end = end, end + num_rows
            yield request_id, PooledRows(num_before, num_rows, rows[start:end, : num_values or None].tobytes())


class AsyncOutput:
    """StepFuture of a step on CUDA. Starts the copy to the host; construct it on the stream that computes."""

    def __init__(self, tensors: StepTensors, inputs: StepInputs, copy_stream: torch.cuda.Stream) -> None:
        self._inputs = inputs
        self._on_device = tensors  # kept until the copy is done, so that its memory is not reused
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            self._on_host = StepTensors(
                None if tensors.token_ids is None else _to_host(tensors.token_ids),
                None if tensors.logprobs is None else _logprobs_to_host(tensors.logprobs),
                [_logprobs_to_host(part) for part in tensors.prompt_logprobs],
                None if tensors.drafts is None else _to_host(tensors.drafts),
                [_to_host(part) for part in tensors.pooled],
            )
            self._copied = torch.cuda.Event()
            self._copied.record()

    def done(self) -> bool:
        is_copied: bool = self._copied.query()
        return is_copied

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the copy. CUDA has no wait with a timeout, so `timeout` is ignored and the watchdog applies."""
        self._copied.synchronize()
        return collect(self._on_host, self._inputs)


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _logprobs_to_host(tensors: LogprobTensors) -> LogprobTensors:
    return LogprobTensors(
        _to_host(tensors.token_ids),
        _to_host(tensors.logprobs),
        _to_host(tensors.ranks),
        _to_host(tensors.top_token_ids),
        _to_host(tensors.top_logprobs),
        None if tensors.named is None else _to_host(tensors.named),
    )


def _prompt_logprobs(parts: list[LogprobTensors], inputs: StepInputs) -> Iterator[tuple[str, list[TokenLogprobs], int]]:
    """Yield, for each request, its entries of this step and their end among those of its prompt."""
    if inputs.prompt_logprobs is None:
        return
    most = max((num_top for _, _, num_top in inputs.prompt_logprobs.requests), default=0)
    rows = (row for part in parts for row in _rows(part, most))
    for name, positions, num_top in inputs.prompt_logprobs.requests:
        yield name, [_cut(next(rows), num_top) for _ in positions], positions.stop


class _Logprobs:
    """The log probabilities of a step's samples, consumed in the order of the rows."""

    def __init__(self, tensors: StepTensors, inputs: StepInputs) -> None:
        self.num_top: Mapping[str, int] = {}  # by id of the requests with log probabilities
        wanted = None if inputs.sampling is None else inputs.sampling.logprobs
        if tensors.logprobs is not None and wanted is not None:
            self.num_top, self._named = wanted.num_top, wanted.named
            self._rows = _rows(tensors.logprobs, max(wanted.num_top.values()))

    def take(self, name: str, num_samples: int) -> list[TokenLogprobs]:
        named = self._named.get(name, ())
        return [_cut(row, self.num_top[name], named) for row in islice(self._rows, num_samples)]


_Row = tuple[TokenLogprobs, Sequence[float]]


def _rows(tensors: LogprobTensors, num_top: int) -> Iterator[_Row]:
    """Yield the rows of `tensors`, each with its `num_top` most likely tokens (or fewer, if the tensors have fewer) and
    the log probabilities of the tokens that its request names."""
    columns = (
        tensors.token_ids.tolist(),
        tensors.logprobs.tolist(),
        tensors.ranks.tolist(),
        tensors.top_token_ids[:, :num_top].tolist(),
        tensors.top_logprobs[:, :num_top].tolist(),
    )
    named = repeat(()) if tensors.named is None else tensors.named.tolist()
    return ((TokenLogprobs(*row), values) for row, values in zip(zip(*columns, strict=True), named, strict=False))


def _cut(row: _Row, num_top: int, token_ids: Sequence[int] = ()) -> TokenLogprobs:
    """Return the log probabilities of the row's sampled token and of `token_ids`, or of the `num_top` most likely
    tokens if the request names none."""
    entry, named = row
    if token_ids:
        return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, token_ids, named[: len(token_ids)])
    top = entry.top_token_ids[:num_top], entry.top_logprobs[:num_top]
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, *top)
