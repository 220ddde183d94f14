"""Steps that a worker makes up for itself: to warm up, and to find how much memory the largest ones take."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proa.contract import SamplingParams
from proa_engine.core.types import CachedRequestData, NewRequestData, SchedulerOutput
from proa_engine.worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
LIMITED = SamplingParams(top_k=10, top_p=0.9)
PENALIZED = SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)
_EVERYTHING: dict[str, Any] = {
    "top_k": 10,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "logit_bias": {0: 1.0},
    "bad_words_token_ids": ((0,), (0, 0)),
    "min_tokens": 2,
}
_FIRST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large steps become, and the KV cache that made-up ones write to."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_logprobs: int
    block_size: int
    num_blocks: int
    max_drafts: int = 0


class WarmUp:
    """Runs made-up steps. `synchronize` waits until the device has done what it was told."""

    def __init__(self, runner: ModelRunner, limits: StepLimits, synchronize: Callable[[], None]) -> None:
        self._runner = runner
        self._limits = limits
        self._synchronize = synchronize

    def run_largest(self) -> None:
        """The most tokens at once, then the most requests at once, with all that they may ask for."""
        limits = self._limits
        self._run_alone(self._long_prompts(limits.max_num_batched_tokens), GREEDY)
        each = min(max(limits.max_num_batched_tokens // limits.max_num_seqs, 1), limits.max_model_len - 1)
        count = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        logprobs = limits.max_logprobs
        everything = SamplingParams(**_EVERYTHING, logprobs=logprobs, prompt_logprobs=logprobs)
        self._run_alone([each] * count, everything)
        self._run_drafts(count, everything)

    def run_every_kind(self) -> None:
        """A small step of each kind that launches kernels of its own, prefill and decode."""
        num_tokens = min(_FIRST_TOKENS, self._limits.max_num_batched_tokens, self._limits.max_model_len - 1)
        for params in (GREEDY, LIMITED, PENALIZED, SamplingParams(**_EVERYTHING, logprobs=1)):
            self._run(self._prefill_plan([num_tokens], params))
            self.time_decode(num_tokens)
            self._run_drafts(1, params)

    def run_every_tiling(self) -> None:
        """Prompts of all powers of two, and as many prompts: products, those of logits too, tile few rows otherwise
        than many, and change within a doubling."""
        most = self._limits.max_num_batched_tokens
        for num_tokens in (*(1 << power for power in range(most.bit_length())), most):
            self._run_alone(self._long_prompts(num_tokens), GREEDY)
            if num_tokens <= self._limits.max_num_seqs:
                self._run_alone([1] * num_tokens, GREEDY)

    def time_prefill(self, num_tokens: int) -> float:
        """Seconds that a prompt takes; it stays for `time_decode`."""
        return self._run(self._prefill_plan([num_tokens], GREEDY))

    def time_decode(self, num_tokens: int) -> float:
        """Seconds of a decode of the prompt before, which then leaves."""
        seconds = self._run(decode_plan(["warm-up-0"], num_tokens))
        self._runner.prepare(finish_plan(["warm-up-0"]))
        return seconds

    def _run_drafts(self, count: int, params: SamplingParams) -> None:
        """Decodes with as many drafts as there may be, of `count` prompts or as many as fit into a step."""
        num_drafts = min(
            self._limits.max_drafts, self._limits.max_model_len - 2, self._limits.max_num_batched_tokens - 1
        )
        if num_drafts == 0:
            return
        plan = self._prefill_plan([1] * min(count, self._limits.max_num_batched_tokens // (1 + num_drafts)), params)
        request_ids = list(plan.num_scheduled_tokens)
        self._run(plan)
        self._run(decode_plan(request_ids, 1, 1 + num_drafts))
        self._runner.prepare(finish_plan(request_ids))

    def _run_alone(self, lengths: Sequence[int], params: SamplingParams) -> None:
        plan = self._prefill_plan(lengths, params)
        self._run(plan)
        self._runner.prepare(finish_plan(list(plan.num_scheduled_tokens)))

    def _long_prompts(self, num_tokens: int) -> list[int]:
        """Lengths of the fewest prompts with so many tokens, or of as many as there may be. Each leaves room for the
        token after it; the short one comes first, as a single token has to."""
        longest = self._limits.max_model_len - 1
        count, rest = divmod(min(num_tokens, longest * self._limits.max_num_seqs), longest)
        return [rest] * (rest > 0) + [longest] * count

    def _prefill_plan(self, lengths: Sequence[int], params: SamplingParams) -> SchedulerOutput:
        return prefill_plan(
            lengths, block_size=self._limits.block_size, num_blocks=self._limits.num_blocks, params=params
        )

    def _run(self, plan: SchedulerOutput) -> float:
        """Run one step to its end; returns seconds."""
        started = time.monotonic()
        inputs = self._runner.prepare(plan)
        assert inputs is not None
        self._runner.forward(inputs)
        self._runner.sample()
        self._synchronize()
        return time.monotonic() - started


def prefill_plan(
    lengths: Sequence[int], *, block_size: int, num_blocks: int, params: SamplingParams = GREEDY
) -> SchedulerOutput:
    """A step of prompts of these lengths, named warm-up-0 and so on.

    All requests share the blocks, over and over: what they write is never read again.
    """
    requests = [
        NewRequestData(
            request_id=f"warm-up-{index}",
            token_ids=[0] * length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=[block % num_blocks for block in range(-(-(length + 1) // block_size))],
            sampling_params=params,
        )
        for index, length in enumerate(lengths)
    ]
    return _plan(new=requests, scheduled={request.request_id: len(request.token_ids) for request in requests})


def decode_plan(request_ids: list[str], num_computed_tokens: int, num_tokens: int = 1) -> SchedulerOutput:
    cached = [
        CachedRequestData(request_id=request_id, num_computed_tokens=num_computed_tokens, new_block_ids=[])
        for request_id in request_ids
    ]
    return _plan(cached=cached, scheduled=dict.fromkeys(request_ids, num_tokens))


def finish_plan(request_ids: list[str]) -> SchedulerOutput:
    return _plan(finished=request_ids)


def _plan(
    *,
    new: list[NewRequestData] | None = None,
    cached: list[CachedRequestData] | None = None,
    scheduled: dict[str, int] | None = None,
    finished: list[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        new_requests=new or [],
        cached_requests=cached or [],
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
        finished_request_ids=finished or [],
        preempted_request_ids=[],
    )
