"""Beam search on batches, with vLLM's outputs. Each step of a beam is a request for its next token, whose prompt is the
beam so far: beams share what they have in common through the prefix cache."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm.auto import tqdm

from proa.beam_search import Beam, BeamSearch, BeamSearchParams
from proa.contract import EngineCoreRequest
from proa_engine.offline.llm_engine import LLMEngine
from proa_engine.offline.outputs import Logprob, logprobs_by_token
from proa_engine.offline.progress import UseTqdm
from proa_engine.offline.prompts import LoRARequest, Prompt, TokenizedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One result. `tokens` and `text` begin with the prompt. `text`: with special tokens; None without a tokenizer."""

    orig_prompt: Prompt
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # one for each token of the output: its beam's likeliest tokens
    cum_logprob: float
    text: str | None
    finish_reason: str  # stop or length
    stop_reason: int | None  # the end-of-sequence token
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The `beam_width` best sequences for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class _Search:
    prompt: Prompt
    tokenized: TokenizedPrompt
    lora: LoRARequest | None
    beams: BeamSearch


class BeamSearcher:
    """Runs the searches of one call. Raises `ValueError`, before anything runs, for a prompt that the model cannot
    serve, and for more beams than the engine has log probabilities for."""

    def __init__(
        self,
        engine: LLMEngine,
        params: BeamSearchParams,
        prompts: Sequence[Prompt],
        loras: Sequence[LoRARequest | None],
    ) -> None:
        limits = engine.limits
        if params.num_logprobs > limits.max_logprobs:
            raise ValueError(
                f"beam_width must be at most {limits.max_logprobs // 2}, half of max_logprobs "
                f"({limits.max_logprobs}), got {params.beam_width}"
            )
        self._engine = engine
        self._params = params
        self._searches = [self._make(prompt, lora) for prompt, lora in zip(prompts, loras, strict=True)]
        self._now = time.time()
        for each in self._searches:
            self._request(each, Beam())
        engine.load_loras(lora for lora in loras if lora is not None)

    def run(self, concurrency_limit: int, use_tqdm: UseTqdm) -> list[BeamSearchOutput]:
        """Run the searches, so many prompts at a time. The bar counts the steps of the longest search."""
        groups = [
            self._searches[start : start + concurrency_limit]
            for start in range(0, len(self._searches), concurrency_limit)
        ]
        make = use_tqdm if callable(use_tqdm) else tqdm
        total = len(groups) * self._params.max_tokens
        with make(total=total, desc="Beam search", unit="token", disable=not use_tqdm) as bar:
            for group in groups:
                while running := [each for each in group if not each.beams.is_finished]:
                    self._step(running)
                    bar.update()
        return [BeamSearchOutput([self._sequence(each, beam) for beam in each.beams.best()]) for each in self._searches]

    def _step(self, running: Sequence[_Search]) -> None:
        requests = [self._request(each, beam) for each in running for beam in each.beams.beams]
        outputs = iter(self._engine.compute(requests))
        for each in running:
            each.beams.advance([next(outputs).logprobs[0] for _ in each.beams.beams])

    def _make(self, prompt: Prompt, lora: LoRARequest | None) -> _Search:
        tokenized = self._engine.tokenize(prompt)
        beams = BeamSearch(
            self._params,
            num_prompt_tokens=len(tokenized.token_ids),
            eos_token_ids=self._engine.eos_token_ids,
            max_model_len=self._engine.limits.lengths.max_model_len,
        )
        return _Search(prompt, tokenized, lora, beams)

    def _request(self, each: _Search, beam: Beam) -> EngineCoreRequest:
        prompt = replace(each.tokenized, token_ids=[*each.tokenized.token_ids, *beam.token_ids])
        lora_name = "" if each.lora is None else each.lora.lora_name
        return self._engine.prepare_next(prompt, self._params.num_logprobs, self._now, lora_name)

    def _sequence(self, each: _Search, beam: Beam) -> BeamSearchSequence:
        tokens, tokenizer = [*each.tokenized.token_ids, *beam.token_ids], self._engine.tokenizer
        return BeamSearchSequence(
            orig_prompt=each.prompt,
            tokens=tokens,
            logprobs=[logprobs_by_token(entry, tokenizer) for entry in beam.logprobs],
            cum_logprob=beam.cumulative_logprob,
            text=None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False),
            finish_reason="length" if beam.eos_token_id is None else "stop",
            stop_reason=beam.eos_token_id,
            lora_request=each.lora,
        )
