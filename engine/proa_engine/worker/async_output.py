"""A step's results: copied from the device to the host, then turned into a ModelRunnerOutput.

On CUDA, `AsyncOutput` copies them on a separate stream, so that neither the next step's kernels nor the calling thread
wait for the copy. On a CPU no copy is needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat

import torch
from torch import Tensor

from proa.contract import TokenLogprobs
from proa_engine.core.types import Drafts, ModelRunnerOutput, PooledRows
from proa_engine.worker.logprobs import LogprobInputs
from proa_engine.worker.pooling import PooledGroup
from proa_engine.worker.sampler import LogprobTensors
from proa_engine.worker.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's results for the host."""

    token_ids: Tensor | None  # [samples] int64
    logprobs: LogprobTensors | None
    prompt_logprobs: list[LogprobTensors]  # slices, in order
    drafts: Tensor | None = None  # [sampling rows, 2] int64: numbers of accepted and of proposed draft tokens
    pooled: list[Tensor] = field(default_factory=list)  # [rows, values] float32 of each group of pooled requests


def collect(tensors: StepTensors, inputs: StepInputs) -> ModelRunnerOutput:
    """Make a step's output, in the order of its rows. The tensors must be on the host, their copies complete."""
    output = _collect_tokens(tensors, inputs)
    if inputs.pooling is not None:
        for values, group in zip(tensors.pooled, inputs.pooling.groups, strict=True):
            output.pooled.update(_pooled_rows(values, group))
    return output


def _collect_tokens(tensors: StepTensors, inputs: StepInputs) -> ModelRunnerOutput:
    token_ids: list[int] = [] if tensors.token_ids is None else tensors.token_ids.tolist()
    prompt_logprobs = _prompt_logprobs(tensors.prompt_logprobs, inputs)
    if tensors.drafts is not None:
        return _collect_accepted(iter(token_ids), tensors.drafts, tensors.logprobs, prompt_logprobs, inputs)
    logprobs = _logprobs(tensors.logprobs, _logprob_inputs(inputs))
    if len(token_ids) == len(inputs.request_ids) and not (logprobs or prompt_logprobs):
        return ModelRunnerOutput(plain_token_ids=token_ids)
    output = ModelRunnerOutput(plain_token_ids=[], logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    ids = iter(token_ids)
    for request_id, is_sampled in zip(inputs.request_ids, inputs.is_sampled, strict=True):
        _add_row(output, request_id, [next(ids)] if is_sampled else [])
    return output


def _pooled_rows(values: Tensor, group: PooledGroup) -> Iterator[tuple[str, PooledRows]]:
    rows, end = values.numpy().astype("<f4", copy=False), 0
    for request_id, num_before, num_rows, num_values in group.requests:
        start, end = end, end + num_rows
        yield request_id, PooledRows(num_before, num_rows, rows[start:end, : num_values or None].tobytes())


def _collect_accepted(
    ids: Iterator[int],
    counts: Tensor,
    logprobs: LogprobTensors | None,
    prompt_logprobs: dict[str, list[TokenLogprobs]],
    inputs: StepInputs,
) -> ModelRunnerOutput:
    """Keep each row's samples of accepted draft tokens plus one; discard the rest."""
    assert inputs.drafts is not None
    output = ModelRunnerOutput(plain_token_ids=[], prompt_logprobs=prompt_logprobs)
    draft_counts: Iterator[list[int]] = iter(counts.tolist())
    wanted = _logprob_inputs(inputs)
    logprob_rows = iter(()) if logprobs is None or wanted is None else _rows(logprobs, max(wanted.num_top.values()))
    for name, is_sampled, planned in zip(inputs.request_ids, inputs.is_sampled, inputs.drafts.num_planned, strict=True):
        accepted, proposed = next(draft_counts) if is_sampled else (0, 0)
        num_samples, num_kept = (planned + 1, accepted + 1) if is_sampled else (0, 0)
        if planned:
            output.drafts[name] = Drafts(planned, proposed)
        if wanted is not None and (num_top := wanted.num_top.get(name)) is not None:
            rows = list(islice(logprob_rows, num_samples))[:num_kept]
            output.logprobs[name] = [_cut(row, num_top, wanted.named.get(name, ())) for row in rows]
        _add_row(output, name, list(islice(ids, num_samples))[:num_kept])
    return output


def _add_row(output: ModelRunnerOutput, request_id: str, token_ids: list[int]) -> None:
    """Add a row's tokens. The output has its drafts and log probabilities already."""
    details = (output.drafts, output.logprobs, output.prompt_logprobs)
    if len(token_ids) == 1 and not any(request_id in by_id for by_id in details):
        output.plain_token_ids.append(token_ids[0])
    else:
        output.sampled_token_ids[request_id] = token_ids


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


def _logprob_inputs(inputs: StepInputs) -> LogprobInputs | None:
    return None if inputs.sampling is None else inputs.sampling.logprobs


def _logprobs(tensors: LogprobTensors | None, inputs: LogprobInputs | None) -> dict[str, list[TokenLogprobs]]:
    if tensors is None or inputs is None:
        return {}
    rows, named = _rows(tensors, max(inputs.num_top.values())), inputs.named
    return {name: [_cut(next(rows), count, named.get(name, ()))] for name, count in inputs.num_top.items()}


def _prompt_logprobs(parts: list[LogprobTensors], inputs: StepInputs) -> dict[str, list[TokenLogprobs]]:
    if inputs.prompt_logprobs is None:
        return {}
    most = max((num_top for _, _, num_top in inputs.prompt_logprobs.requests), default=0)
    rows = (row for part in parts for row in _rows(part, most))
    return {
        name: [_cut(next(rows), num_top) for _ in range(count)]
        for name, count, num_top in inputs.prompt_logprobs.requests
    }


_Row = tuple[TokenLogprobs, Sequence[float]]


def _rows(tensors: LogprobTensors, num_top: int) -> Iterator[_Row]:
    """The rows with their `num_top` most likely tokens, or fewer if the tensors have fewer, and the log probabilities
    of the tokens that their requests name."""
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
    """The row's sampled token, with the tokens `token_ids` if the request names some, else with the `num_top` most
    likely ones."""
    entry, named = row
    if token_ids:
        return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, token_ids, named[: len(token_ids)])
    top = entry.top_token_ids[:num_top], entry.top_logprobs[:num_top]
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, *top)
