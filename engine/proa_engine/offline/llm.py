"""LLM: offline inference on batches in one process, with vLLM's interface."""

import itertools
import reprlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm.auto import tqdm

from proa.contract import PoolingParams, PoolingTask, SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.json_configs import PoolerConfig, SpeculativeConfig
from proa_engine.offline.llm_engine import LLMEngine
from proa_engine.offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine_scores,
    make_output,
    pairs,
    params_of_task,
)
from proa_engine.offline.prompts import LoRARequest, Message, Prompt, TokenizedPrompt, are_token_ids

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")
LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A loaded model.

    llm = LLM("builtin", max_num_seqs=64)
    outputs = llm.generate(["Hello"], SamplingParams(max_tokens=8))
    outputs[0].outputs[0].text
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        pooler_config: Mapping[str, Any] | None = None,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        **config: Any,
    ) -> None:
        """Load `model`. `config` are the other fields of `EngineConfig`, `speculative_config` those of
        `SpeculativeConfig`, `pooler_config` those of `PoolerConfig`; only a gateway embeds inputs in parts.
        `limit_mm_per_prompt`: `{"image": N}`, the images of a prompt (default: any number).

        Raises `TypeError` for an argument that is not a field, and `ValueError` for one out of range or for a model
        that cannot be loaded.
        """
        speculative = None if speculative_config is None else SpeculativeConfig.from_mapping(speculative_config)
        pooler = None if pooler_config is None else PoolerConfig.from_mapping(pooler_config)
        arguments = {"max_waiting_requests": sys.maxsize} | config  # a batch may be of any size
        self.llm_engine = LLMEngine(
            EngineConfig(model=model, speculative_config=speculative, pooler_config=pooler, **arguments),
            max_images=_max_images(limit_mm_per_prompt or {}),
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoraRequests = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts in one batch, and return the outputs in the order of the prompts.

        A prompt is text, token ids, or a mapping with one of them as `prompt` or `prompt_token_ids`, and images as
        `multi_modal_data`: `{"image": image}` or `{"image": [image, …]}`, of Pillow. Text then has the model's
        placeholder for each image, token ids have its token once or as often as the image has tokens.

        `sampling_params`: one for all prompts, one for each, or None for the defaults. Requests without a seed draw one
        each from the engine's seed. `lora_request`: the adapter of all prompts, one or None for each, or None; adapters
        that are not loaded are loaded first.

        Raises `ValueError`, before anything runs, if the model cannot serve one of the requests.
        """
        return self._generate(_batch(prompts), sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = True,
        lora_request: LoraRequests = None,
    ) -> list[RequestOutput]:
        """Generate the next assistant message of one conversation or several, with the model's chat template.

        Messages may have parts with images: `{"type": "image_pil", "image_pil": image}`, or an `image_url` with a data
        URL. `tools`: functions that the model may call, in the form of the OpenAI API. Calls stay in the text, in the
        model's own format. `lora_request` as in `generate`.

        Raises `ValueError` as `generate` does, and if the model has no tokenizer, no chat template, or one without
        tools where tools are given.
        """
        prompts = [self.llm_engine.tokenize_chat(conversation, tools) for conversation in _conversations(messages)]
        return self._generate(prompts, sampling_params, use_tqdm, lora_request)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute numbers of all prompts in one batch: `pooling_task` is "embed", "token_embed", "classify",
        "token_classify" or "token_logprobs", and may be left out where `pooling_params` have a task.

        Raises `ValueError`, before anything runs, if the model cannot serve one of the requests.
        """
        params = params_of_task(pooling_task, pooling_params)
        by_token = params.task.is_by_token
        batch = [(prompt, params) for prompt in _batch(prompts)]
        return self._pool(batch, lambda rows: PoolingOutput(rows if by_token else rows[0]), lora_request, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt."""
        batch = [(prompt, params_of_task("embed", pooling_params)) for prompt in _batch(prompts)]
        return self._pool(batch, lambda rows: EmbeddingOutput(rows[0].tolist()), lora_request, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's labels for each prompt."""
        batch = [(prompt, params_of_task("classify", pooling_params)) for prompt in _batch(prompts)]
        return self._pool(batch, lambda rows: ClassificationOutput(rows[0].tolist()), lora_request, use_tqdm)

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` goes with that of `data_1`, or with its only one: the cosine of their
        embeddings, or what a model with one label says of the pair."""
        texts = pairs(data_1, data_2)
        engine = self.llm_engine
        if PoolingTask.EMBED in engine.pooling_tasks:
            first, second = ([pair[side] for pair in texts] for side in (0, 1))
            found = self.embed([*first, *second], use_tqdm=use_tqdm)
            return cosine_scores(found[: len(texts)], found[len(texts) :])
        if engine.num_labels != 1:
            raise ValueError("score needs a model for embeddings, or one with a single label")
        if engine.tokenizer is None:
            raise ValueError("score needs a tokenizer")
        batch: list[tuple[Prompt, PoolingParams]] = []
        for pair in texts:
            token_ids, start = engine.tokenizer.encode_pair(*pair)
            batch.append((token_ids, PoolingParams(task=PoolingTask.CLASSIFY, second_segment_start=start)))
        return self._pool(batch, lambda rows: ScoringOutput(float(rows)), None, use_tqdm)

    def _generate(
        self,
        batch: Sequence[Prompt | TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: LoraRequests,
    ) -> list[RequestOutput]:
        each = _one_each(sampling_params, len(batch))
        loras = _loras(lora_request, len(batch))
        now = time.time()
        ids = [str(next(self._ids)) for _ in batch]
        prepared = [
            self.llm_engine.prepare(request_id, prompt, params, 0, now, "" if lora is None else lora.lora_name)
            for request_id, prompt, params, lora in zip(ids, batch, each, loras, strict=True)
        ]
        self.llm_engine.load_loras(lora for lora in loras if lora is not None)
        for state, requests in prepared:
            self.llm_engine.submit(state, requests)
        try:
            finished = self._run(len(batch), use_tqdm)
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise
        return [finished[request_id] for request_id in ids]

    def _pool(
        self,
        batch: Sequence[tuple[Prompt, PoolingParams]],
        make: Callable[["Tensor"], T],
        lora_request: LoRARequest | None,
        use_tqdm: bool,
    ) -> list[PoolingRequestOutput[T]]:
        """`make` makes a result of its rows, [rows, values]."""
        now, lora_name = time.time(), "" if lora_request is None else lora_request.lora_name
        requests = [self.llm_engine.prepare_pooled(prompt, params, now, lora_name) for prompt, params in batch]
        self.llm_engine.load_loras([lora_request] if lora_request else [])
        with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as bar:
            outputs = self.llm_engine.pool(requests, bar.update)
        return [
            make_output(str(next(self._ids)), list(request.prompt_token_ids), output, make)
            for request, output in zip(requests, outputs, strict=True)
        ]

    def _run(self, num_requests: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=num_requests, desc="Processed prompts", disable=not use_tqdm) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step(only_finished=True):
                    finished[output.request_id] = output
                    bar.update()
        return finished


def _max_images(limits: Mapping[str, object]) -> int | None:
    limit = limits.get("image")
    if limit is None or isinstance(limit, int):
        return limit
    raise ValueError(f"limit_mm_per_prompt must have a number of images, got {limit!r}")


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    listed: list[Any] = list(messages)
    conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
    for conversation in conversations:
        if isinstance(conversation, str) or not all(isinstance(message, Mapping) for message in conversation):
            raise ValueError(f"messages must be a list of messages, or of such lists, got {reprlib.repr(messages)}")
    return conversations


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Iterable):
        return [prompts]  # refused as any other object that is no prompt
    if isinstance(prompts, (str, Mapping)) or (prompts and are_token_ids(prompts)):
        return [prompts]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
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
