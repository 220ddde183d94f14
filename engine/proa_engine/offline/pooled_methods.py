"""The methods of `LLM` that compute numbers of prompts: embeddings, classes and scores."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from proa.contract import PoolingParams, PoolingTask
from proa_engine.offline.llm_engine import LLMEngine
from proa_engine.offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine_scores,
    make_output,
    pairs,
    params_of_task,
)
from proa_engine.offline.progress import Progress, UseTqdm
from proa_engine.offline.prompts import LoRARequest, Prompt, prompts_of

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")


class PooledMethods:
    """A base class of `LLM`."""

    llm_engine: LLMEngine
    _ids: "itertools.count[int]"  # of outputs

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute numbers of all prompts in one batch: `pooling_task` is "embed", "token_embed", "classify",
        "token_classify" or "token_logprobs", and may be left out where `pooling_params` have a task.

        Raises `ValueError`, before anything runs, if the model cannot serve one of the requests.
        """
        params = params_of_task(pooling_task, pooling_params)
        by_token = params.task.is_by_token
        batch = [(prompt, params) for prompt in prompts_of(prompts)]
        return self._pool(batch, lambda rows: PoolingOutput(rows if by_token else rows[0]), lora_request, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt."""
        batch = [(prompt, params_of_task("embed", pooling_params)) for prompt in prompts_of(prompts)]
        return self._pool(batch, lambda rows: EmbeddingOutput(rows[0].tolist()), lora_request, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's labels for each prompt."""
        batch = [(prompt, params_of_task("classify", pooling_params)) for prompt in prompts_of(prompts)]
        return self._pool(batch, lambda rows: ClassificationOutput(rows[0].tolist()), lora_request, use_tqdm)

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: UseTqdm = True
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

    def _pool(
        self,
        batch: Sequence[tuple[Prompt, PoolingParams]],
        make: Callable[["Tensor"], T],
        lora_request: LoRARequest | None,
        use_tqdm: UseTqdm,
    ) -> list[PoolingRequestOutput[T]]:
        """`make` makes a result of its rows, [rows, values]."""
        now, lora_name = time.time(), "" if lora_request is None else lora_request.lora_name
        requests = [self.llm_engine.prepare_pooled(prompt, params, now, lora_name) for prompt, params in batch]
        self.llm_engine.load_loras([lora_request] if lora_request else [])
        with Progress(use_tqdm, len(requests)) as progress:
            outputs = self.llm_engine.compute(requests, lambda request: progress.add(len(request.prompt_token_ids)))
        return [
            make_output(str(next(self._ids)), list(request.prompt_token_ids), output, make)
            for request, output in zip(requests, outputs, strict=True)
        ]
