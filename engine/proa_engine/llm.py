"""LLM: offline batches in one process, with vLLM's names, so that its users change one import."""

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from proa.contract import SamplingParams
from proa_engine.config import (
    Device,
    DType,
    EngineConfig,
    KvCacheDtype,
    LoadFormat,
    Quantization,
    SchedulingPolicy,
)
from proa_engine.llm_engine import LLMEngine, Prompt, are_token_ids
from proa_engine.outputs import RequestOutput
from proa_engine.speculative_config import SpeculativeConfig

Message = Mapping[str, Any]


class LLM:
    """A model, loaded. Arguments are those of `EngineConfig`, `speculative_config` as a mapping.

    llm = LLM("builtin")
    outputs = llm.generate(["Hello"], SamplingParams(max_tokens=8))
    outputs[0].outputs[0].text
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: DType = "auto",
        quantization: Quantization | None = None,
        kv_cache_dtype: KvCacheDtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        async_scheduling: bool = True,
        enforce_eager: bool = False,
        batch_invariant: bool = False,
        scheduling_policy: SchedulingPolicy = "fcfs",
        max_logprobs: int = 20,
        speculative_config: Mapping[str, Any] | None = None,
        device: Device = "auto",
        tensor_parallel_size: int = 1,
        load_format: LoadFormat = "auto",
        skip_tokenizer_init: bool = False,
        seed: int = 0,
    ) -> None:
        """Raises `ValueError` with a sentence where the model cannot be loaded."""
        config = EngineConfig(
            model=model,
            tokenizer=tokenizer,
            revision=revision,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting_requests=sys.maxsize,  # a batch is as long as its caller made it
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            enforce_eager=enforce_eager,
            batch_invariant=batch_invariant,
            scheduling_policy=scheduling_policy,
            max_logprobs=max_logprobs,
            speculative_config=None
            if speculative_config is None
            else SpeculativeConfig.from_mapping(speculative_config),
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            load_format=load_format,
            skip_tokenizer_init=skip_tokenizer_init,
            seed=seed,
        )
        self.llm_engine = LLMEngine(config)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for all prompts, batched; outputs in the order of the prompts.

        A prompt is text, token ids, or a mapping with one of them as `prompt` or `prompt_token_ids`. `sampling_params`:
        one for all, or one each; none: the defaults. Requests without a seed get theirs from the engine's, by their
        order. Raises `ValueError` before anything runs if the model cannot serve one of them.
        """
        batch = _batch(prompts)
        each = _one_each(sampling_params, len(batch))
        now = time.time()
        ids = [str(next(self._ids)) for _ in batch]
        prepared = [
            self.llm_engine.prepare(request_id, prompt, params, 0, now)
            for request_id, prompt, params in zip(ids, batch, each, strict=True)
        ]
        for state, requests in prepared:
            self.llm_engine.submit(state, requests)
        try:
            finished = self._run(len(batch), use_tqdm)
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the assistant's answer to one conversation or several, through the model's chat template."""
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [{"prompt_token_ids": tokenizer.apply_chat_template(conversation)} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _run(self, num_requests: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=num_requests, desc="Processed prompts", disable=not use_tqdm) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step(only_finished=True):
                    finished[output.request_id] = output
                    bar.update()
        return finished


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)) or (prompts and are_token_ids(prompts)):
        return [prompts]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts need one SamplingParams, or {count}, not {len(params)}")
    return list(params)
