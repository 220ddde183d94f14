"""Warm-up: run made-up steps, to compile kernels, to time them and to measure the memory of the largest ones."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from proa.contract import PoolingParams, SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.timing.step_costs import CONTEXT_ROW_TOKENS, StepCosts
from proa_engine.core.types import BASE_MODEL, LoraSlot, SchedulerOutput
from proa_engine.kernels.sampling.sampling_params import LIMITS, PARAMETERS
from proa_engine.kernels.sampling.token_bitmask import WORD
from proa_engine.memory.kv_cache import image_of, most_image_tokens
from proa_engine.models.audio_config import AudioConfig
from proa_engine.models.image_config import ImageConfig
from proa_engine.models.pooling_config import PoolingConfig
from proa_engine.observability.progress import Progress
from proa_engine.step import token_rules
from proa_engine.worker.warmup_steps import (
    FIRST_TOKENS,
    GREEDY,
    MEDIA_HASH,
    audio_step,
    context_step,
    decode_step,
    finish_step,
    image_step,
    pooling_examples,
    prefill_step,
)

_LIMITS: dict[str, Any] = {p.name: p.example for p in PARAMETERS if p.operation in LIMITS}
_PENALTIES: dict[str, Any] = {p.name: p.example for p in PARAMETERS if p.operation not in LIMITS}
_EVERYTHING = _LIMITS | _PENALTIES | token_rules.EXAMPLES
LIMITED = SamplingParams(**_LIMITS)
PENALIZED = SamplingParams(**_PENALTIES)
# Enough to time a step, as it reads every weight; a whole token budget of a large model takes a CPU a minute.
_CPU_TIMED_TOKENS = 256
# Tokens before the row with which attention is timed. A GPU is so fast that a shorter context is not noticed.
_CPU_TIMED_CONTEXT = 8192
_GPU_TIMED_CONTEXT = 131_072
# In a transformer's products with weights, a token costs as much as attention to six times as many tokens as a hidden
# state has values: 1536 for the narrowest encoders.
_WHOLE_PROMPT_TOKENS = 1024


class StepRunner(Protocol):
    """The part of `ModelRunner` that runs steps."""

    @property
    def device(self) -> torch.device: ...

    def prepare_inputs(self, scheduler_output: SchedulerOutput, /) -> Any: ...

    def execute_model(self, inputs: Any, /) -> None: ...

    def sample_tokens(self, masks: GrammarMasks | None = None, /) -> Any: ...


class WarmUp:
    """Runs made-up steps on a runner with this KV cache. `generates` False: the model supports pooled requests only."""

    def __init__(
        self,
        runner: StepRunner,
        config: EngineConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        groups: CacheGroups,
        pooling: PoolingConfig,
        generates: bool,
        whole_prompts: bool = False,
        lora: LoraSlot = BASE_MODEL,
        images: ImageConfig | None = None,
        audios: AudioConfig | None = None,
    ) -> None:
        """`whole_prompts`: each token attends to all others. `lora`: the adapter of all requests. `images`,
        `audios`: how the model reads them, None if it reads none."""
        self._runner = runner
        self._on_step: Callable[[], None] = lambda: None
        self._device = runner.device
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._images = images
        self._audios = audios
        self._most_image_tokens = 0 if images is None else most_image_tokens(config, images.input, max_model_len)
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._max_logprobs = max(config.max_logprobs, 0)  # copied to the host; a device computes the maximum
        self._num_drafts = min(config.num_speculative_tokens, max_model_len - 2, config.max_num_batched_tokens - 1)
        self._groups = groups
        self._whole_prompts = whole_prompts
        self._lora = lora
        self._generates = generates
        self._pooled = pooling_examples(pooling)
        self._simplest: SamplingParams | PoolingParams = GREEDY if generates else self._pooled[0]

    def count_steps(self) -> int:
        """Return the number of steps of `run`, without running one."""
        rehearsal, counter = copy(self), _StepCounter(self._device)
        rehearsal._runner = counter
        rehearsal.run()
        return counter.num_steps

    def run(self, on_step: Callable[[], None] = lambda: None) -> StepCosts:
        """Run a step of each kind and shape, and time those that cost the most. `on_step` is called after each step.

        A CPU is timed with a shorter prefill and a smaller image, scaled up.
        """
        self._on_step = on_step
        encoding = self._time_encoding() + self._time_audio()
        self.run_every_kind()
        if self._device.type != "cpu":
            self.run_every_tiling()
        budget = self._max_num_batched_tokens
        longest = _CPU_TIMED_TOKENS if self._device.type == "cpu" else budget
        num_tokens = min(longest, budget, self._max_model_len - 1)
        if self._generates:
            scored = SamplingParams(temperature=0.0, prompt_logprobs=self._max_logprobs)
            token, decode = self._time_prefill(num_tokens, scored) / num_tokens, self._time_decode(num_tokens)
        else:
            token, decode = self._run_alone([num_tokens], self._simplest) / num_tokens, 0.0
        return StepCosts(step=decode, token=token, pair=self._time_pair(token), images=encoding)

    def run_largest(self) -> None:
        """Run the steps that take the most memory: the largest image, the most tokens, then the most requests with
        every operation."""
        if self._images is not None:
            self._run_image(*image_of(self._images.input, self._most_image_tokens))
        self._time_audio()
        for params in (self._simplest, *self._pooled):
            self._run_alone(self._long_prompts(self._max_num_batched_tokens), params)
        if not self._generates:
            return
        each = min(max(self._max_num_batched_tokens // self._max_num_seqs, 1), self._max_model_len - 1)
        count = min(self._max_num_seqs, self._max_num_batched_tokens)
        logprobs = self._max_logprobs
        everything = SamplingParams(**_EVERYTHING, logprobs=logprobs, prompt_logprobs=logprobs)
        self._run_alone([each] * count, everything)
        self._run_drafts(count, everything)

    def run_every_kind(self) -> None:
        """Run a small prefill and a decode of each kind that launches kernels of its own."""
        num_tokens = min(FIRST_TOKENS, self._max_num_batched_tokens, self._max_model_len - 1)
        for pooled in self._pooled:
            self._run_alone([num_tokens], pooled)
        if not self._generates:
            return
        for params in (GREEDY, LIMITED, PENALIZED, SamplingParams(**_EVERYTHING, logprobs=1)):
            self._run(self._prefill_step([num_tokens], params))
            self._time_decode(num_tokens)
            self._run_drafts(1, params)
        for params in (GREEDY, PENALIZED):  # penalized logits are float32, others of the model's type
            self._run_constrained(params)

    def run_every_tiling(self) -> None:
        """Run prompts of every power of two tokens, and that many prompts of one token, which then get drafts, to the
        most of each.

        Matrix products, those of the logits too, are tiled by their number of rows, and the tiling changes within a
        doubling.
        """
        most = self._max_num_batched_tokens
        counts = [*(1 << power for power in range(most.bit_length())), most]
        for num_tokens in counts:
            self._run_alone(self._long_prompts(num_tokens), self._simplest)
        for count in dict.fromkeys(min(num_tokens, self._max_num_seqs) for num_tokens in counts):
            self._run_alone([1] * count, self._simplest)
            if self._generates:
                self._run_drafts(count, GREEDY)

    def _time_pair(self, token: float) -> float:
        """Return the seconds in which a token attends to one token before it. `token`: seconds of a token."""
        if self._whole_prompts:
            return token / _WHOLE_PROMPT_TOKENS
        num_tokens = min(CONTEXT_ROW_TOKENS, self._max_num_batched_tokens, self._max_model_len // 2)
        most = _CPU_TIMED_CONTEXT if self._device.type == "cpu" else _GPU_TIMED_CONTEXT
        num_before = min(most, self._max_model_len - 1 - num_tokens)
        if num_tokens < 2 or num_before < 1:  # of lengths at which attention costs nothing
            return 0.0
        without = self._run_alone([num_tokens], self._simplest)
        step = context_step(num_tokens, num_before, self._groups, self._simplest)
        seconds = []
        for _ in range(2):  # the first may compile kernels
            seconds.append(self._run(step))
            self._runner.prepare_inputs(finish_step(list(step.num_scheduled_tokens)))
        # A busy machine may have delayed the shorter step.
        return max(min(seconds) - without, min(seconds) / 50) / (num_tokens * num_before)

    def _time_encoding(self) -> float:
        """Return an upper bound of the seconds in which one step's images are encoded; 0.0 if the model reads none."""
        if self._images is None:
            return 0.0
        image_input, most = self._images.input, self._most_image_tokens
        counts = [min(_CPU_TIMED_TOKENS, most)]
        if self._device.type != "cpu":  # every power of two, see `run_every_tiling`
            counts = [*(1 << power for power in range(most.bit_length())), most]
        sizes = list(dict.fromkeys(image_of(image_input, count) for count in counts))
        seconds = [self._run_image(*size) for size in sizes]
        return seconds[-1] * max(self._max_num_batched_tokens, most) / image_input.num_tokens(*sizes[-1])

    def _time_audio(self) -> float:
        """Return an upper bound of the seconds in which one step's audios are encoded; 0.0 if the model reads none."""
        if not self._audios:
            return 0.0
        audio_input = self._audios.input
        seconds = self._run_encoding(audio_step(audio_input, self._groups, self._most_tokens, self._simplest))
        return seconds * max(self._max_num_batched_tokens // audio_input.max_tokens, 1)

    def _run_image(self, height: int, width: int) -> float:
        """Run a step with an image of this size in pixels. Returns seconds."""
        assert self._images is not None
        most = self._most_tokens
        return self._run_encoding(image_step(height, width, self._images.input, self._groups, most, self._simplest))

    @property
    def _most_tokens(self) -> int:
        """Tokens of the longest prompt that one step computes."""
        return min(self._max_num_batched_tokens, self._max_model_len - 1)

    def _run_encoding(self, step: SchedulerOutput) -> float:
        """Run a step that encodes something, and one that frees it. Returns seconds of the first."""
        seconds = self._run(step)
        request_ids = list(step.num_scheduled_tokens)
        self._runner.prepare_inputs(finish_step(request_ids))
        self._run(replace(self._prefill_step([1], self._simplest), freed_media=[MEDIA_HASH]))
        self._runner.prepare_inputs(finish_step(request_ids))
        return seconds

    def _time_prefill(self, num_tokens: int, params: SamplingParams) -> float:
        """Return the seconds of a prefill. Its request stays for `_time_decode`."""
        return self._run(self._prefill_step([num_tokens], params))

    def _time_decode(self, num_tokens: int) -> float:
        """Return the seconds of a decode of the prefilled request of `num_tokens` tokens, which then finishes."""
        seconds = self._run(decode_step(["warm-up-0"], num_tokens))
        self._runner.prepare_inputs(finish_step(["warm-up-0"]))
        return seconds

    def _run_drafts(self, count: int, params: SamplingParams | PoolingParams) -> None:
        """Run decodes with the maximum number of draft tokens, of `count` requests or as many as fit into a step."""
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
        self._run(replace(prefill, grammar_rows=[0]), GrammarMasks([0], [0], bits.data))
        self._runner.prepare_inputs(finish_step(list(prefill.num_scheduled_tokens)))

    def _run_alone(self, lengths: Sequence[int], params: SamplingParams | PoolingParams) -> float:
        """Run a prefill whose requests then finish. Returns seconds."""
        prefill = self._prefill_step(lengths, params)
        seconds = self._run(prefill)
        self._runner.prepare_inputs(finish_step(list(prefill.num_scheduled_tokens)))
        return seconds

    def _long_prompts(self, num_tokens: int) -> list[int]:
        """Return the lengths of the fewest prompts with `num_tokens` tokens in all, or of one prompt for each slot.

        Each leaves room for a sampled token. A shorter prompt comes first, because rows of one token must.
        """
        longest = self._max_model_len - 1
        count, rest = divmod(min(num_tokens, longest * self._max_num_seqs), longest)
        return [rest] * (rest > 0) + [longest] * count

    def _prefill_step(self, lengths: Sequence[int], params: SamplingParams | PoolingParams) -> SchedulerOutput:
        return prefill_step(lengths, self._groups, params, self._lora)

    def _run(self, scheduler_output: SchedulerOutput, masks: GrammarMasks | None = None) -> float:
        """Run one step and wait for the device. Returns seconds."""
        started = time.monotonic()
        inputs = self._runner.prepare_inputs(scheduler_output)
        assert inputs is not None
        self._runner.execute_model(inputs)
        self._runner.sample_tokens(masks)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._on_step()
        return time.monotonic() - started


def run_warm_ups(warm_ups: Sequence[WarmUp], log: Callable[[str], None]) -> StepCosts:
    """Run all, and log the progress of the whole. Returns the longest times of each."""
    progress = Progress(log, "warming up", sum(each.count_steps() for each in warm_ups), "steps")
    costs = StepCosts()
    for warm_up in warm_ups:
        costs = costs.longest_of(warm_up.run(lambda: progress.add(1)))
    return costs


class _StepCounter:
    """A `StepRunner` that computes nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_steps = 0

    def prepare_inputs(self, scheduler_output: SchedulerOutput, /) -> Any:
        return scheduler_output

    def execute_model(self, inputs: Any, /) -> None:
        self.num_steps += 1

    def sample_tokens(self, masks: GrammarMasks | None = None, /) -> Any:
        return None
