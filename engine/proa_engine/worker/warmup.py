"""Warm-up: run made-up steps, to compile and time them and to find how much memory the largest ones take."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from proa.contract import SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.core.cache_groups import CacheGroups
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.types import (
    NO_STATE,
    CachedRequestData,
    LoraSlot,
    NewRequestData,
    SchedulerOutput,
    StateSteps,
)
from proa_engine.kernels.sampling_params import LIMITS, PARAMETERS
from proa_engine.kernels.token_bitmask import WORD
from proa_engine.worker import token_rules
from proa_engine.worker.model_runner import ModelRunner

_LIMITS: dict[str, Any] = {p.name: p.example for p in PARAMETERS if p.operation in LIMITS}
_PENALTIES: dict[str, Any] = {p.name: p.example for p in PARAMETERS if p.operation not in LIMITS}
_EVERYTHING = _LIMITS | _PENALTIES | token_rules.EXAMPLES
GREEDY = SamplingParams(temperature=0.0)
LIMITED = SamplingParams(**_LIMITS)
PENALIZED = SamplingParams(**_PENALTIES)
_FIRST_TOKENS = 16
# Touches every weight and is enough to time; with a large model a CPU needs a minute for a whole token budget.
_CPU_TIMED_TOKENS = 256


class WarmUp:
    """Runs made-up steps on a runner with this KV cache."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        groups: CacheGroups,
        lora: LoraSlot | None = None,
    ) -> None:
        """`lora`: the adapter of all requests."""
        self._runner = runner
        self._device = runner.device
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._max_logprobs = max(config.max_logprobs, 0)  # to the host; a device always computes its most
        self._num_drafts = min(config.num_speculative_tokens, max_model_len - 2, config.max_num_batched_tokens - 1)
        self._groups = groups
        self._lora = lora

    def run(self) -> float:
        """Run a step of each kind and shape; returns the seconds of the longest, a prefill of the full token budget.

        A CPU is timed with a shorter prefill, scaled up.
        """
        self.run_every_kind()
        if self._device.type != "cpu":
            self.run_every_tiling()
        budget = self._max_num_batched_tokens
        longest = _CPU_TIMED_TOKENS if self._device.type == "cpu" else budget
        num_tokens = min(longest, budget, self._max_model_len - 1)
        prefill, decode = self._time_prefill(num_tokens), self._time_decode(num_tokens)
        return max(prefill * budget / num_tokens, decode)

    def run_largest(self) -> None:
        """Run the steps that take the most memory: the most tokens, then the most requests with every operation."""
        self._run_alone(self._long_prompts(self._max_num_batched_tokens), GREEDY)
        each = min(max(self._max_num_batched_tokens // self._max_num_seqs, 1), self._max_model_len - 1)
        count = min(self._max_num_seqs, self._max_num_batched_tokens)
        logprobs = self._max_logprobs
        everything = SamplingParams(**_EVERYTHING, logprobs=logprobs, prompt_logprobs=logprobs)
        self._run_alone([each] * count, everything)
        self._run_drafts(count, everything)

    def run_every_kind(self) -> None:
        """Run a small prefill and a decode of each kind that launches kernels of its own."""
        num_tokens = min(_FIRST_TOKENS, self._max_num_batched_tokens, self._max_model_len - 1)
        for params in (GREEDY, LIMITED, PENALIZED, SamplingParams(**_EVERYTHING, logprobs=1)):
            self._run(self._prefill_step([num_tokens], params))
            self._time_decode(num_tokens)
            self._run_drafts(1, params)
        for params in (GREEDY, PENALIZED):  # penalized logits are float32, others of the model's type
            self._run_constrained(params)

    def run_every_tiling(self) -> None:
        """Run prompts of every power of two tokens, and that many prompts of one token.

        Matrix products, those of the logits too, are tiled by their number of rows, and the tiling changes within a
        doubling.
        """
        most = self._max_num_batched_tokens
        for num_tokens in (*(1 << power for power in range(most.bit_length())), most):
            self._run_alone(self._long_prompts(num_tokens), GREEDY)
            if num_tokens <= self._max_num_seqs:
                self._run_alone([1] * num_tokens, GREEDY)

    def _time_prefill(self, num_tokens: int) -> float:
        """Seconds of a prefill. Its request stays for `_time_decode`."""
        return self._run(self._prefill_step([num_tokens], GREEDY))

    def _time_decode(self, num_tokens: int) -> float:
        """Seconds of a decode of the prefilled request of `num_tokens` tokens, which then finishes."""
        seconds = self._run(decode_step(["warm-up-0"], num_tokens))
        self._runner.prepare_inputs(finish_step(["warm-up-0"]))
        return seconds

    def _run_drafts(self, count: int, params: SamplingParams) -> None:
        """Run decodes with the most draft tokens, of `count` requests or as many as fit into a step."""
        if self._num_drafts <= 0:
            return
        count = min(count, self._max_num_batched_tokens // (1 + self._num_drafts))
        prefill = self._prefill_step([1] * count, params)
        request_ids = list(prefill.num_scheduled_tokens)
        self._run(prefill)
        self._run(decode_step(request_ids, 1, 1 + self._num_drafts))
        self._runner.prepare_inputs(finish_step(request_ids))

    def _run_constrained(self, params: SamplingParams) -> None:
        """Run a prefill that samples under a grammar, which allows every token."""
        prefill = self._prefill_step([1], params)
        num_words = -(-self._vocab_size // WORD)
        bits = np.full(num_words, -1, np.int32)
        self._run(replace(prefill, grammar_rows=[0]), GrammarMasks([0], bits.data))
        self._runner.prepare_inputs(finish_step(list(prefill.num_scheduled_tokens)))

    def _run_alone(self, lengths: Sequence[int], params: SamplingParams) -> None:
        prefill = self._prefill_step(lengths, params)
        self._run(prefill)
        self._runner.prepare_inputs(finish_step(list(prefill.num_scheduled_tokens)))

    def _long_prompts(self, num_tokens: int) -> list[int]:
        """Lengths of the fewest prompts of `num_tokens` tokens in all, or of as many as there are slots.

        Each leaves room for a sampled token. The shorter one comes first: rows of one token must.
        """
        longest = self._max_model_len - 1
        count, rest = divmod(min(num_tokens, longest * self._max_num_seqs), longest)
        return [rest] * (rest > 0) + [longest] * count

    def _prefill_step(self, lengths: Sequence[int], params: SamplingParams) -> SchedulerOutput:
        return prefill_step(lengths, self._groups, params, self._lora)

    def _run(self, scheduler_output: SchedulerOutput, masks: GrammarMasks | None = None) -> float:
        """Run one step and wait for the device; returns seconds."""
        started = time.monotonic()
        inputs = self._runner.prepare_inputs(scheduler_output)
        assert inputs is not None
        self._runner.execute_model(inputs)
        self._runner.sample_tokens(masks)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - started


def prefill_step(
    lengths: Sequence[int], groups: CacheGroups, params: SamplingParams = GREEDY, lora: LoraSlot | None = None
) -> SchedulerOutput:
    """A step of new prompts of these lengths, with ids warm-up-0, warm-up-1, …

    All share the same blocks, some more than once: what they write is never read.
    """
    tables = range(groups.num_tables)
    requests = [
        NewRequestData(
            request_id=f"warm-up-{index}",
            token_ids=[0] * length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=[_blocks(length + 1, groups) for _ in tables],
            sampling_params=params,
            lora=lora,
        )
        for index, length in enumerate(lengths)
    ]
    lengths_by_id = {request.request_id: len(request.token_ids) for request in requests}
    return _step(new=requests, scheduled=lengths_by_id, states=_states(lengths_by_id, groups))


def first_steps(groups: CacheGroups, *, max_num_tokens: int) -> list[SchedulerOutput]:
    """A prefill of at most `max_num_tokens` tokens, a decode of its request, and the end of that request."""
    num_tokens = min(_FIRST_TOKENS, max_num_tokens)
    prefill = prefill_step([num_tokens], groups)
    request_ids = list(prefill.num_scheduled_tokens)
    return [prefill, decode_step(request_ids, num_tokens), finish_step(request_ids)]


def decode_step(request_ids: list[str], num_computed_tokens: int, num_tokens: int = 1) -> SchedulerOutput:
    """A step that computes `num_tokens` tokens of each of these requests."""
    cached = [
        CachedRequestData(request_id=request_id, num_computed_tokens=num_computed_tokens, new_block_ids=())
        for request_id in request_ids
    ]
    return _step(cached=cached, scheduled=dict.fromkeys(request_ids, num_tokens))


def finish_step(request_ids: list[str]) -> SchedulerOutput:
    """A step without tokens that removes these requests."""
    return _step(finished=request_ids)


def _blocks(num_tokens: int, groups: CacheGroups) -> list[int]:
    return [block % groups.num_blocks for block in range(-(-num_tokens // groups.block_size))]


def _states(lengths: Mapping[str, int], groups: CacheGroups) -> dict[str, StateSteps]:
    """A slot for each prompt, some for more than one: what they write is never checked."""
    if not groups.num_state_slots:
        return {}
    return {
        request_id: StateSteps(NO_STATE, ((length, index % groups.num_state_slots),))
        for index, (request_id, length) in enumerate(lengths.items())
    }


def _step(
    *,
    new: list[NewRequestData] | None = None,
    cached: list[CachedRequestData] | None = None,
    scheduled: dict[str, int] | None = None,
    finished: list[str] | None = None,
    states: Mapping[str, StateSteps] | None = None,
) -> SchedulerOutput:
    counts = scheduled or {}
    return SchedulerOutput(
        step=0,
        new_requests=new or [],
        cached_requests=cached or [],
        decode_request_ids=[request_id for request_id, num_tokens in counts.items() if num_tokens == 1],
        num_chunk_tokens={request_id: num_tokens for request_id, num_tokens in counts.items() if num_tokens > 1},
        finished_request_ids=finished or [],
        preempted_request_ids=[],
        states=states or {},
    )
