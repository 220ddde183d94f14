"""LLMEngine: offline inference one step at a time, on the caller's thread. Prompts in, `RequestOutput`s out."""

import gc
import itertools
import logging
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from proa.contract import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Grammar,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    StructuredOutputsParams,
    choice_key,
)
from proa.grammar import check, lower
from proa.tokenizer_files import sampling_defaults
from proa_engine.config import EngineConfig
from proa_engine.core.admission.validation import check_request
from proa_engine.core.lora_store import LoraError
from proa_engine.core.operations import LoadLora, Operation, ResetPrefixCache, Sleep, SleepLevel, WakeUp
from proa_engine.core.types import Rejection, StepOutputs
from proa_engine.engine_parts import EngineParts, load_engine
from proa_engine.grammar import NO_LIMITS
from proa_engine.models.generation_config import read_prompt_files
from proa_engine.offline.output_processor import OutputProcessor, RequestState
from proa_engine.offline.outputs import RequestOutput
from proa_engine.offline.prompts import LoRARequest, Message, Prompt, PromptTokenizer, TokenizedPrompt, paths_by_name
from proa_engine.prompt_embeds import with_hashes
from proa_engine.tokenizer import ChatOptions, Tokenizer

T = TypeVar("T")
_log = logging.getLogger(__name__)


def load_for_batches(config: EngineConfig, report: Callable[[str], None]) -> EngineParts:
    """`load_engine` without limits on how many grammars wait to be compiled, and for how long."""
    return load_engine(config, report, grammar_queue=NO_LIMITS)


class LLMEngine:
    """Add requests, then call `step` until none is unfinished. Not thread-safe.

    engine = LLMEngine(EngineConfig(model="builtin"))
    engine.add_request("1", "Hello", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            ...
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_images: int | None = None,
        load: Callable[[EngineConfig, Callable[[str], None]], EngineParts] = load_for_batches,
    ) -> None:
        """Load the model. `max_images`: of a prompt; None: any number.

        Raises `ValueError`, with a sentence for the user, if that fails.
        """
        parts = load(config, _log.info)
        self._core = parts.core
        self.limits = parts.limits
        self.eos_token_ids = parts.executor.started.eos_token_ids
        self.num_labels = len(parts.executor.started.model_config.pooling.labels)
        files = read_prompt_files(config, parts.tokenizer_folder)
        self.sampling_defaults = sampling_defaults(files)  # the model's own parameters, by name
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer(files)
        self._prompts = PromptTokenizer(self.tokenizer, parts.limits.images, max_images, parts.limits.audios)
        self._processor = OutputProcessor(self.tokenizer)
        self._check_grammar = lru_cache(maxsize=1024)(check)  # a batch has few different ones
        self._max_loras = config.lora.max_loaded_loras
        self._lora_paths: dict[str, str] = {}  # of loaded adapters, by name
        self._early: deque[StepOutputs] = deque()  # of steps that ran while adapters were loaded
        self._is_asleep = False
        self._serial = itertools.count()
        self._seeds = random.Random(config.seed)  # for requests without a seed: equal in each run of a program
        self.shutdown = weakref.finalize(self, _shut_down, parts)  # also at exit

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request. `prompt` is as in `LLM.generate`. Requests with a lower `priority` are scheduled first.
        `arrival_time` is in Unix seconds. The adapter of `lora_request` is loaded first, if it is not.

        Raises `ValueError` if the model cannot serve the request, or if the id belongs to an unfinished one.
        """
        lora_name = "" if lora_request is None else lora_request.lora_name
        state, requests = self.prepare(request_id, prompt, params, priority, arrival_time or time.time(), lora_name)
        self.load_loras([lora_request] if lora_request else [])
        self.submit(state, requests)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams,
        priority: int,
        arrival_time: float,
        lora_name: str = "",
    ) -> tuple[RequestState, list[EngineCoreRequest]]:
        """Check a request and return the arguments for `submit`. Raises `ValueError` as `add_request` does."""
        if request_id in self._processor:
            raise ValueError(f"request_id {request_id!r} belongs to an unfinished request")
        tokenized = prompt if isinstance(prompt, TokenizedPrompt) else self._prompts.tokenize(prompt)
        params = replace(params)  # a copy, as the caller may change its own
        requests, choices = [], []
        for index, choice_params in enumerate(self._params_of_choices(params)):
            core_id = f"{request_id}/{next(self._serial)}"  # unique: the caller may reuse an id that the core still has
            request = EngineCoreRequest(
                request_id=core_id,
                prompt_token_ids=tokenized.token_ids,
                images=tokenized.images,
                audios=tokenized.audios,
                prompt_embeds=tokenized.embeds,
                sampling_params=choice_params,
                priority=priority,
                arrival_time=arrival_time,
                lora_name=lora_name,
            )
            check_request(request, self.limits)
            requests.append(with_hashes(request))
            choices.append(self._processor.make_choice(core_id, index, tokenized.text_token_ids, choice_params))
        state = RequestState(
            request_id=request_id,
            prompt=tokenized.text,
            prompt_token_ids=tokenized.token_ids,
            params=params,
            choices=choices,
        )
        return state, requests

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """The prompt for `prepare` and `prepare_next`. Raises `ValueError` as `PromptTokenizer.tokenize`."""
        return self._prompts.tokenize(prompt)

    def tokenize_chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> TokenizedPrompt:
        """The prompt of a conversation, for `prepare`. Raises `ValueError` as `PromptTokenizer.tokenize_chat`."""
        return self._prompts.tokenize_chat(messages, options or ChatOptions())

    def prepare_pooled(
        self, prompt: Prompt, params: PoolingParams, arrival_time: float, lora_name: str = ""
    ) -> EngineCoreRequest:
        """Check a pooled request and return it for `pool`. Raises `ValueError` if the model cannot serve it."""
        return self._single(self._prompts.tokenize(prompt), SamplingParams(), params, arrival_time, lora_name)

    def prepare_next(
        self, prompt: TokenizedPrompt, num_logprobs: int, arrival_time: float, lora_name: str = ""
    ) -> EngineCoreRequest:
        """Check a request for the next token's `num_logprobs` likeliest choices and return it for `compute`. Raises
        `ValueError` if the model cannot serve it."""
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=num_logprobs, ignore_eos=True, key=0)
        return self._single(prompt, params, None, arrival_time, lora_name)

    def compute(
        self, requests: Sequence[EngineCoreRequest], on_result: Callable[[EngineCoreRequest], object] = lambda _: None
    ) -> list[EngineCoreOutput]:
        """Compute requests of `prepare_pooled` or `prepare_next`, which have one output each. Returns the outputs in
        the same order.

        `on_result` is called for each that ends. Outputs of other requests are kept for `step`. Whatever is raised, no
        request of them is left. Raises `ValueError` for a request that the core rejects.
        """
        self._check_awake()
        for request in requests:
            self._core.submit(request)
        wanted = {request.request_id: request for request in requests}
        results: dict[str, EngineCoreOutput] = {}

        def take(outputs: StepOutputs) -> None:
            for output in outputs.outputs:
                if output.request_id in wanted:
                    results[output.request_id] = output
                    on_result(wanted[output.request_id])
            for rejection in outputs.rejections:
                if rejection.request_id in wanted:
                    raise ValueError(rejection.message)
            outputs.outputs = [output for output in outputs.outputs if output.request_id not in wanted]

        try:
            self._step_until(lambda: len(results) == len(wanted), take)
        except BaseException:
            self._core.abort(wanted.keys() - results.keys())
            raise
        return [results[request.request_id] for request in requests]

    def load_loras(self, lora_requests: Iterable[LoRARequest]) -> None:
        """Load the adapters that are not loaded, and wait for them. One whose name has another path is replaced.

        Raises `ValueError` for an adapter that cannot be loaded, or for more of them than max_cpu_loras.
        """
        wanted = paths_by_name(lora_requests)
        if len(wanted) > self._max_loras:
            raise ValueError(f"{len(wanted)} adapters cannot be loaded together, at most {self._max_loras}")
        # To load one may unload another one without requests, the least recently used.
        while missing := [name for name, path in wanted.items() if self._lora_paths.get(name) != path]:
            for name in missing:
                self._load_lora(name, wanted[name])

    def submit(self, state: RequestState, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue a request that `prepare` has checked. Raises `RuntimeError` while the engine sleeps."""
        self._check_awake()
        self._processor.add(state)
        for request in requests:
            self._core.submit(request)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests without further output. Unknown ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._core.abort(self._processor.remove(request_id))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self._operate(ResetPrefixCache())

    def sleep(self, level: SleepLevel, *, wait: bool) -> None:
        """Free the memory of weights and KV cache. Level 1 keeps the weights in host memory, level 2 loads them again.
        Unfinished requests are aborted unless `wait`."""
        self._operate(Sleep(level, wait=wait))
        self._is_asleep = True

    def wake_up(self) -> None:
        """End `sleep`. No-op if the engine is awake."""
        self._operate(WakeUp())
        self._is_asleep = False

    @property
    def pooling_tasks(self) -> frozenset[PoolingTask]:
        """What the model can compute of a prompt."""
        return self.limits.pooling_tasks

    def has_unfinished_requests(self) -> bool:
        return bool(self._early) or self._core.has_unfinished_requests()

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """Compute one step. Returns cumulative outputs of the requests with new tokens, or only of the finished ones.

        Blocks until a grammar is compiled if all unfinished requests wait for theirs. A request whose grammar the
        engine refuses finishes with "error". Raises what the executor raises.
        """
        outputs = self._early.popleft() if self._early else self._step_core()
        if outputs is None:
            return []
        refused = [_refused(rejection) for rejection in outputs.rejections]
        states, to_abort = self._processor.process([*outputs.outputs, *refused], outputs.plain)
        if to_abort:
            self._core.abort(to_abort)
        return [self._processor.make_output(state) for state in states if state.finished or not only_finished]

    def _step_until(self, is_done: Callable[[], bool], take: Callable[[StepOutputs], None] = lambda _: None) -> None:
        """Step the core until `is_done`. `take` removes the outputs that it wants; the others are kept for `step`."""
        while not is_done():
            self._core.wait_for_work()
            outputs = self._step_core()
            if outputs is None:
                continue
            take(outputs)
            if outputs.outputs or outputs.plain.token_ids or outputs.rejections:
                self._early.append(outputs)

    def _step_core(self) -> StepOutputs | None:
        if self._core.has_unfinished_requests():
            self._core.wait_for_work()
        outputs = self._core.step()
        if outputs is not None and outputs.loras is not None:
            loaded = {lora.name: lora.path for lora in outputs.loras.loras}
            self._lora_paths = {name: self._lora_paths.get(name, path) for name, path in loaded.items()}
        return outputs

    def _operate(self, operation: Operation[T]) -> T:
        done = self._core.operate(operation)
        self._step_until(done.done)
        return done.result()

    def _check_awake(self) -> None:
        if self._is_asleep:
            raise RuntimeError("the engine sleeps: call wake_up first")

    def _single(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        pooling_params: PoolingParams | None,
        arrival_time: float,
        lora_name: str,
    ) -> EngineCoreRequest:
        """A request for `compute`."""
        request = EngineCoreRequest(
            request_id=f"single/{next(self._serial)}",
            prompt_token_ids=prompt.token_ids,
            images=prompt.images,
            audios=prompt.audios,
            prompt_embeds=prompt.embeds,
            sampling_params=params,
            pooling_params=pooling_params,
            arrival_time=arrival_time,
            lora_name=lora_name,
        )
        check_request(request, self.limits)
        return with_hashes(request)

    def _load_lora(self, name: str, path: str) -> None:
        try:
            self._operate(LoadLora(name, path, replace=True))
        except LoraError as error:
            raise ValueError(str(error)) from error
        self._lora_paths[name] = path

    def _params_of_choices(self, params: SamplingParams) -> Iterable[SamplingParams]:
        """Parameters of each of the `n` choices, with its key, and what is made with the tokenizer; only the first has
        prompt logprobs."""
        bad_words = params.bad_words_token_ids
        if params.bad_words:
            if self.tokenizer is None:
                raise ValueError("bad_words need a tokenizer; give bad_words_token_ids instead")
            bad_words += self.tokenizer.bad_words_token_ids(params.bad_words)
        grammar = params.grammar if params.structured_outputs is None else self._lower(params.structured_outputs)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        for index in range(params.n):
            yield replace(
                params,
                n=1,
                key=choice_key(seed, index) if params.key is None else params.key,
                bad_words_token_ids=bad_words,
                structured_outputs=None,
                grammar=grammar,
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            )

    def _lower(self, structured_outputs: StructuredOutputsParams) -> Grammar:
        if self.tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer")
        lowered = lower(structured_outputs, self.tokenizer.added_tokens)
        self._check_grammar(lowered.grammar.text)
        for warning in lowered.warnings:
            _log.warning("structured outputs: %s", warning)
        return lowered.grammar


def _refused(rejection: Rejection) -> EngineCoreOutput:
    """The output of a request that the core rejected: its grammar was refused, or its adapter is not loaded any more.
    `prepare` has checked all else."""
    _log.error("request %s rejected: %s", rejection.request_id, rejection.message)
    return EngineCoreOutput(request_id=rejection.request_id, finish_reason=FinishReason.ERROR, error=rejection.message)


def _shut_down(parts: EngineParts) -> None:
    """Stop threads and workers, free the device, and undo the `gc.freeze` of `load_engine`."""
    parts.shutdown()
    gc.unfreeze()
