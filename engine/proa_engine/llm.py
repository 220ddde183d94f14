"""LLM: offline batches in one process, with vLLM's names, so that its users change one import."""

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tqdm.auto import tqdm

from proa_engine.config import EngineConfig
from proa_engine.core.sampling_params import SamplingParams
from proa_engine.llm_engine import LLMEngine, Prompt
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
        dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
        quantization: Literal["awq", "compressed-tensors", "fp8", "gptq"] | None = None,
        kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        async_scheduling: bool = True,
        enforce_eager: bool = False,
        batch_invariant: bool = False,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        speculative_config: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        load_format: Literal["auto", "dummy"] = "auto",
        skip_tokenizer_init: bool = False,
        seed: int = 0,
    ) -> None:
        """Raises `ValueError` with a sentence where the model cannot be loaded."""
        config = EngineConfig(
            model=model,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting_requests=sys.maxsize,  # a batch is as long as its caller made it
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            enforce_eager=enforce_eager,
            batch_invariant=batch_invariant,
            scheduling_policy=scheduling_policy,
            speculative_config=None
            if speculative_config is None
            else SpeculativeConfig.from_mapping(speculative_config),
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

        A prompt is text or `{"prompt_token_ids": […]}`. `sampling_params`: one for all, or one each; none: the
        defaults. Raises `ValueError` before anything runs if the model cannot serve one of them.
        """
        batch = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
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


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts need one SamplingParams, or {count}, not {len(params)}")
    return list(params)
