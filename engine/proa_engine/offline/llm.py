"""LLM: offline inference on batches in one process, with vLLM's interface."""

import difflib
import itertools
import reprlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar, Unpack

from proa.beam_search import BeamSearchParams
from proa.contract import SamplingParams
from proa.options import flat
from proa_engine.config import EngineConfig
from proa_engine.json_configs import JsonConfig, PoolerConfig, SpeculativeConfig
from proa_engine.offline.arguments import EngineArguments
from proa_engine.offline.beam_search import BeamSearcher, BeamSearchOutput
from proa_engine.offline.llm_engine import LLMEngine
from proa_engine.offline.outputs import RequestOutput
from proa_engine.offline.pooled_methods import PooledMethods
from proa_engine.offline.progress import Progress, UseTqdm
from proa_engine.offline.prompts import LoRARequest, Message, Prompt, TokenizedPrompt, prompts_of
from proa_engine.tokenizer import ChatOptions, Tokenizer

T = TypeVar("T")
Config = TypeVar("Config", bound=JsonConfig)
LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None
SamplingParamsOfEach = SamplingParams | Sequence[SamplingParams] | None
Conversations = Sequence[Message] | Sequence[Sequence[Message]]

_NO_CODE = "code of callers is not run in the workers"
_NO_WEIGHTS = "weights are loaded once, from the model's folder; load an adapter, or make another LLM"
REFUSED: Mapping[str, str] = {
    "apply_model": _NO_CODE,
    "collective_rpc": _NO_CODE,
    "finish_weight_update": _NO_WEIGHTS,
    "get_metrics": "metrics are served by proa-engine serve; outputs have their numbers of tokens",
    "get_weight_version": _NO_WEIGHTS,
    "init_weight_transfer_engine": _NO_WEIGHTS,
    "reset_mm_cache": "images are cached by their content, so that no other image is ever found",
    "start_draft_weight_update": _NO_WEIGHTS,
    "start_profile": "profile the process, with torch.profiler or py-spy",
    "start_weight_update": _NO_WEIGHTS,
    "stop_profile": "profile the process, with torch.profiler or py-spy",
    "update_weight_version": _NO_WEIGHTS,
    "update_weights": _NO_WEIGHTS,
}
"""The methods of vLLM's `LLM` that this one does not have, with the reasons."""


class LLM(PooledMethods):
    """A loaded model.

    llm = LLM("builtin", max_num_seqs=64)
    outputs = llm.generate(["Hello"], SamplingParams(max_tokens=8))
    outputs[0].outputs[0].text
    """

    def __init__(
        self,
        model: str,
        *,
        served_model_name: str | Sequence[str] = (),
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        pooler_config: PoolerConfig | Mapping[str, Any] | None = None,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        **config: Unpack[EngineArguments],
    ) -> None:
        """Load `model`. `config` are the other fields of `EngineConfig`; only a gateway embeds inputs in parts.
        `limit_mm_per_prompt`: `{"image": N}`, the images of a prompt (default: any number).

        Raises `TypeError` for an argument that is not a field, and `ValueError` for one out of range or for a model
        that cannot be loaded.
        """
        if unknown := sorted(config.keys() - EngineArguments.__annotations__.keys()):
            close = difflib.get_close_matches(unknown[0], EngineArguments.__annotations__, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"LLM got an unexpected keyword argument {unknown[0]!r}{hint}")
        config.setdefault("max_waiting_requests", sys.maxsize)  # a batch may be of any size
        self._config = EngineConfig.from_options(
            model=model,
            served_model_name=(served_model_name,) if isinstance(served_model_name, str) else tuple(served_model_name),
            speculative_config=_json_config(SpeculativeConfig, speculative_config),
            pooler_config=_json_config(PoolerConfig, pooler_config),
            **config,
        )
        self.llm_engine = LLMEngine(self._config, max_images=_max_images(limit_mm_per_prompt or {}))
        self._ids = itertools.count()
        self._enqueued: list[str] = []  # ids of requests for `wait_for_completion`
        self._finished: dict[str, RequestOutput] = {}  # outputs of those of them that have ended, by id

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLM":
        """Load the model of a configuration."""
        names = {"model", "served_model_name", "speculative_config", "pooler_config", *EngineArguments.__annotations__}
        return cls(**{name: value for name, value in flat(engine_args).items() if name in names})

    if not TYPE_CHECKING:  # checkers would take any name for an attribute

        def __getattr__(self, name: str) -> Never:
            if name in REFUSED:
                raise AttributeError(f"LLM.{name} is not supported: {REFUSED[name]}", name=name, obj=self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ValueError` with skip_tokenizer_init."""
        if self.llm_engine.tokenizer is None:
            raise ValueError("there is no tokenizer: the model was loaded with skip_tokenizer_init")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of the parameters of requests without any: those of the model's generation_config.json."""
        return SamplingParams(**self.llm_engine.sampling_defaults)

    def get_world_size(self) -> int:
        """The number of ranks: tensor_parallel_size times pipeline_parallel_size."""
        return self._config.parallel.num_ranks

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParamsOfEach = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoraRequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts in one batch, and return the outputs in the order of the prompts.

        A prompt is text, token ids, or a mapping with one of them as `prompt` or `prompt_token_ids`, and images as
        `multi_modal_data`: `{"image": image}` or `{"image": [image, …]}`, of Pillow. Text then has the model's
        placeholder for each image, token ids have its token once or as often as the image has tokens. The audio of a
        Whisper model is `{"audio": (array, sampling rate)}`, with one channel at the model's rate; text then begins
        with the special tokens, such as `<|startoftranscript|>`.

        `sampling_params`: one for all prompts, one for each, or None for `get_default_sampling_params`. Requests
        without a seed draw one each from the engine's seed. `lora_request`: the adapter of all prompts, one or None for
        each, or None; adapters that are not loaded are loaded first. `priority`: one for each prompt, the lower first;
        needs `scheduling_policy="priority"`.

        Raises `ValueError`, before anything runs, if the model cannot serve one of the requests.
        """
        return self._run(self._add(prompts_of(prompts), sampling_params, lora_request, priority), use_tqdm)

    def chat(
        self,
        messages: Conversations,
        sampling_params: SamplingParamsOfEach = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoraRequests = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next assistant message of one conversation or several, with the model's chat template.

        Messages may have parts with images: `{"type": "image_pil", "image_pil": image}`, or an `image_url` with a data
        URL. `tools`: functions that the model may call, in the form of the OpenAI API. Calls stay in the text, in the
        model's own format. `chat_template`: the source of another template. `chat_template_kwargs`: variables of the
        template. With `continue_final_message` the output continues the last message; `add_generation_prompt` must be
        False then. `lora_request` as in `generate`.

        Raises `ValueError` as `generate` does, and if the model has no tokenizer, no chat template, or one without
        tools where tools are given.
        """
        options = ChatOptions(
            tools=tools,
            template=chat_template,
            variables=chat_template_kwargs or {},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._run(self._add(self._chats(messages, options), sampling_params, lora_request), use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParamsOfEach = None,
        *,
        lora_request: LoraRequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Queue requests for `wait_for_completion` and return their ids. Arguments and errors as for `generate`."""
        ids = self._add(prompts_of(prompts), sampling_params, lora_request, priority)
        self._enqueued += ids
        return ids

    def enqueue_chat(
        self,
        messages: Conversations,
        sampling_params: SamplingParamsOfEach = None,
        *,
        lora_request: LoraRequests = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue requests for `wait_for_completion` and return their ids. Arguments and errors as for `chat`."""
        options = ChatOptions(
            tools=tools,
            template=chat_template,
            variables=chat_template_kwargs or {},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        ids = self._add(self._chats(messages, options), sampling_params, lora_request, priority)
        self._enqueued += ids
        return ids

    def wait_for_completion(self, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Generate for the requests that were enqueued, and return their outputs in the same order."""
        ids, self._enqueued = self._enqueued, []
        return self._run(ids, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoraRequests = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the `params.beam_width` best outputs of each prompt, by `proa.beam_search`. `concurrency_limit`: prompts
        that are searched at a time; None: all.

        Raises `ValueError`, before anything runs, if the model cannot serve one of the prompts, or if `max_logprobs` is
        below twice the beam width.
        """
        batch = prompts_of(prompts)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise ValueError(f"concurrency_limit must be at least 1, got {concurrency_limit}")
        searcher = BeamSearcher(self.llm_engine, params, batch, _loras(lora_request, len(batch)))
        return searcher.run(concurrency_limit or max(1, len(batch)), use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Unfinished requests keep their blocks. Returns True."""
        self.llm_engine.reset_prefix_cache()
        return True

    def sleep(self, level: Literal[1, 2] = 1, mode: Literal["abort", "wait"] = "abort") -> None:
        """Free the memory of weights and KV cache until `wake_up`. Level 1 keeps the weights in host memory, level 2
        loads them again from the model's files. `mode`: what happens to requests that are enqueued.

        Other methods raise `RuntimeError` until then. Raises `ValueError` for another level or mode.
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        if mode not in ("abort", "wait"):
            raise ValueError(f"mode must be abort or wait, got {mode!r}: the KV cache of requests cannot be kept")
        self.llm_engine.sleep(level, wait=mode == "wait")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End `sleep`. `tags`: None, for all of the memory. Raises `ValueError` for others."""
        if tags is not None:
            raise ValueError(f"tags must be None, got {tags!r}: weights and KV cache are allocated together")
        self.llm_engine.wake_up()

    def _chats(self, messages: Conversations, options: ChatOptions) -> list[TokenizedPrompt]:
        return [self.llm_engine.tokenize_chat(conversation, options) for conversation in _conversations(messages)]

    def _add(
        self,
        batch: Sequence[Prompt | TokenizedPrompt],
        sampling_params: SamplingParamsOfEach,
        lora_request: LoraRequests,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Queue a request for each prompt and return their ids."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        each = _one_each(sampling_params, len(batch))
        loras = _loras(lora_request, len(batch))
        priorities = self._priorities(priority, len(batch))
        now = time.time()
        ids = [str(next(self._ids)) for _ in batch]
        prepared = [
            self.llm_engine.prepare(request_id, prompt, params, order, now, "" if lora is None else lora.lora_name)
            for request_id, prompt, params, order, lora in zip(ids, batch, each, priorities, loras, strict=True)
        ]
        self.llm_engine.load_loras(lora for lora in loras if lora is not None)
        for state, requests in prepared:
            self.llm_engine.submit(state, requests)
        return ids

    def _run(self, ids: Sequence[str], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run all requests to their ends, and return the outputs of these; those that the caller has aborted have none.
        Outputs of others are kept."""
        wanted = frozenset(ids)
        try:
            with Progress(use_tqdm, len(wanted - self._finished.keys())) as progress:
                while self.llm_engine.has_unfinished_requests():
                    for output in self.llm_engine.step(only_finished=True):
                        self._finished[output.request_id] = output
                        if output.request_id in wanted:
                            num_output = sum(len(choice.token_ids) for choice in output.outputs)
                            progress.add(len(output.prompt_token_ids), num_output)
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise
        return [self._finished.pop(request_id) for request_id in ids if request_id in self._finished]

    def _priorities(self, priority: Sequence[int] | None, count: int) -> Sequence[int]:
        if priority is None:
            return [0] * count
        if len(priority) != count:
            raise ValueError(f"{count} prompts need as many priorities, got {len(priority)}")
        if self._config.scheduling_policy != "priority":
            raise ValueError('priority needs an LLM with scheduling_policy="priority"')
        return priority


def _json_config(kind: type[Config], values: Config | Mapping[str, Any] | None) -> Config | None:
    return kind.from_mapping(values) if isinstance(values, Mapping) else values


def _max_images(limits: Mapping[str, object]) -> int | None:
    limit = limits.get("image")
    if limit is None or isinstance(limit, int):
        return limit
    raise ValueError(f"limit_mm_per_prompt must have a number of images, got {limit!r}")


def _conversations(messages: Conversations) -> list[Sequence[Message]]:
    listed: list[Any] = list(messages)
    conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
    for conversation in conversations:
        if isinstance(conversation, str) or not all(isinstance(message, Mapping) for message in conversation):
            raise ValueError(f"messages must be a list of messages, or of such lists, got {reprlib.repr(messages)}")
    return conversations


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ValueError(f"sampling_params must be a SamplingParams or a list of them, got {reprlib.repr(params)}")
    if len(params) != count:
        raise ValueError(f"{count} prompts need one SamplingParams, or {count}, not {len(params)}")
    return list(params)


def _loras(requests: LoraRequests, count: int) -> list[LoRARequest | None]:
    if requests is None or isinstance(requests, LoRARequest):
        return [requests] * count
    if len(requests) != count:
        raise ValueError(f"{count} prompts need one LoRARequest, or {count}, not {len(requests)}")
    return list(requests)
