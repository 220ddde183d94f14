"""A step's results: copied from the device to the host, then turned into a ModelRunnerOutput.

On CUDA, `AsyncOutput` copies them on a separate stream, so that neither the next step's kernels nor the calling thread
wait for the copy. On a CPU no copy is needed.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from proa_engine.core.types import ModelRunnerOutput, RowOutput
from proa_engine.step.columns import StepOutputs
from proa_engine.step.logprobs import LogprobReader, LogprobTensors
from proa_engine.step.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's results, as tensors to be copied to the host."""

    token_ids: Tensor | None = None  # [samples] int64
    logprobs: LogprobTensors | None = None
    results: Sequence[list[Tensor]] = ()  # of each of `StepInputs.parts`


def collect(tensors: StepTensors, inputs: StepInputs) -> ModelRunnerOutput:
    """Make a step's output, in the order of its rows. The tensors must be on the host, their copies complete."""
    token_ids: list[int] = [] if tensors.token_ids is None else tensors.token_ids.tolist()
    if len(token_ids) == len(inputs.request_ids) and tensors.logprobs is None and not any(tensors.results):
        return ModelRunnerOutput(plain_token_ids=token_ids)
    outputs = StepOutputs(defaultdict(RowOutput), list(inputs.num_samples))
    for part, results in zip(inputs.parts, tensors.results, strict=True):
        if results:
            part.add_results(results, outputs)
    others, ids, plain_token_ids = outputs.others, iter(token_ids), list[int]()
    logprobs = _read_logprobs(tensors, inputs)
    for name, num_samples, num_kept in zip(inputs.request_ids, inputs.num_samples, outputs.num_kept, strict=True):
        sampled = list(islice(ids, num_samples))[:num_kept]
        if logprobs is not None and (entries := logprobs.take(name, num_samples)):
            others[name].logprobs = entries[:num_kept]
        if num_kept == 1 and name not in others:
            plain_token_ids += sampled
        else:
            others[name].sampled_token_ids = sampled
    return ModelRunnerOutput(plain_token_ids=plain_token_ids, others=dict(others))


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
                [[_to_host(tensor) for tensor in results] for results in tensors.results],
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


def _read_logprobs(tensors: StepTensors, inputs: StepInputs) -> LogprobReader | None:
    wanted = None if inputs.sampling is None else inputs.sampling.logprobs
    return None if tensors.logprobs is None or wanted is None else LogprobReader(tensors.logprobs, wanted)
