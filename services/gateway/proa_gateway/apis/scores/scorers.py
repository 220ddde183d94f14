"""Scorers: how a model scores a pair of texts.

A cross-encoder computes one value from a prompt with both texts. A bi-encoder computes an embedding of each text; the
score is their cosine. Late interaction computes an embedding of each token. A generative reranker is asked whether the
document fits; the score is the probability of "yes".
"""

import asyncio
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from proa.contract import PoolingParams, PoolingTask
from proa_gateway.apis.scores.protocol import ScoringFields
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import GenerationFailed, UnsupportedTask
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.inputs import (
    Limit,
    PooledInput,
    encode_pairs,
    encode_texts,
    first_tokens,
    has,
    in_groups,
    limit_of,
)
from proa_gateway.pooling.values import matrix, numbers

Pairs = Sequence[tuple[str, str]]

_ROWS: Final = 1024  # of each text that are multiplied at a time: 8 MB of products, however long both texts are
_QUESTION = 'Note that the answer can only be "yes" or "no".'
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    f"provided. {_QUESTION}<|im_end|>\n<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_NAME = "qwen3-reranker"
_OPENING = "<|im_start|>"


class Scorer(Protocol):
    async def inputs(self, first: Sequence[str], second: Sequence[str]) -> list[PooledInput]:
        """Return the engine requests for the scores of the texts. `first` has one text, or as many as `second`."""
        ...

    async def scores(self, outputs: Sequence[PooledValues], num_first: int) -> list[float]:
        """Return the score of each pair. `outputs` are those of the engine requests. `num_first`: number of texts in
        `first`."""
        ...


def choose_scorer(model: ServedModel, request: ScoringFields) -> Scorer:
    """Return the model's scorer. Raises `UnsupportedTask` for a model that cannot score pairs."""
    info, limit = model.info, limit_of(request, model.info)
    has_class = PoolingTask.CLASSIFY in info.pooling_tasks and len(info.labels) <= 1
    if answers_yes_or_no(model):
        if has_class:
            return PromptedCrossEncoder(model, request, limit)
        if PoolingTask.TOKEN_LOGPROBS in info.pooling_tasks:
            return YesNoReranker(model, request, limit)
    if has_class:
        return CrossEncoder(model, request, limit)
    if PoolingTask.EMBED in info.pooling_tasks:
        return BiEncoder(model, limit)
    if PoolingTask.TOKEN_EMBED in info.pooling_tasks:
        return LateInteraction(model, limit)
    message = f"The model {info.model_name!r} has no scores of pairs: that needs one class, or embeddings; {has(info)}."
    raise UnsupportedTask(message, param="model")


async def shortened(texts: list[str], num_tokens: int | None, model: ServedModel) -> list[str]:
    if not num_tokens:
        return texts
    return await model.tokenizer.work_on(texts, lambda tokenizer: first_tokens(tokenizer, texts, num_tokens))


def paired(first: Sequence[str], second: Sequence[str]) -> Pairs:
    return list(zip(first if len(first) == len(second) else [first[0]] * len(second), second, strict=True))


class CrossEncoder:
    def __init__(self, model: ServedModel, request: ScoringFields, limit: Limit) -> None:
        self._tokenizer = model.tokenizer
        self._request = request
        self._limit = limit

    async def inputs(self, first: Sequence[str], second: Sequence[str]) -> list[PooledInput]:
        pairs = paired(first, second)
        encoded = await self._tokenizer.work_on(
            [*first, *second], lambda tokenizer: encode_pairs(tokenizer, pairs, self._limit)
        )
        return [PooledInput(each.token_ids, self._params(each.second_start)) for each in encoded]

    async def scores(self, outputs: Sequence[PooledValues], num_first: int) -> list[float]:
        return [_single(output) for output in outputs]

    def _params(self, second_start: int | None) -> PoolingParams:
        return PoolingParams(
            task=PoolingTask.CLASSIFY,
            use_activation=self._request.use_activation,
            second_segment_start=second_start,
        )


class PromptedCrossEncoder(CrossEncoder):
    """A generative reranker that was converted to a model with one class."""

    async def inputs(self, first: Sequence[str], second: Sequence[str]) -> list[PooledInput]:
        pairs, instruction = paired(first, second), self._request.task_instruction
        encoded = await self._tokenizer.work_on(
            [*first, *second], lambda tokenizer: encode_prompts(tokenizer, pairs, instruction, self._limit)
        )
        return [PooledInput(token_ids, self._params(None)) for token_ids in encoded]


class YesNoReranker(PromptedCrossEncoder):
    """A generative reranker that has kept its head."""

    def __init__(self, model: ServedModel, request: ScoringFields, limit: Limit) -> None:
        super().__init__(model, request, limit)
        self._score_token_ids = tuple(map(self._token_id, ("no", "yes")))  # of `no` and `yes`

    async def scores(self, outputs: Sequence[PooledValues], num_first: int) -> list[float]:
        differences = []
        for output in outputs:
            no, yes = numbers(output.values).tolist()
            differences.append(yes - no)
        if self._request.use_activation is False:
            return differences
        return [_sigmoid(each) for each in differences]  # the softmax of two

    def _params(self, second_start: int | None) -> PoolingParams:
        return PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=self._score_token_ids)

    def _token_id(self, word: str) -> int:
        token_ids = self._tokenizer.encode_now(word, add_special_tokens=False)
        if len(token_ids) != 1:
            raise UnsupportedTask(f"The model's vocabulary has no token for {word!r}.", param="model")
        return token_ids[0]


class BiEncoder:
    task = PoolingTask.EMBED

    def __init__(self, model: ServedModel, limit: Limit) -> None:
        self._tokenizer = model.tokenizer
        self._limit = limit

    async def inputs(self, first: Sequence[str], second: Sequence[str]) -> list[PooledInput]:
        return await self._read([*first, *second], self._limit)

    async def _read(self, texts: Sequence[str], limit: Limit) -> list[PooledInput]:
        params = PoolingParams(task=self.task, use_activation=True)  # of length 1
        encoded = await self._tokenizer.work_on(
            texts, lambda tokenizer: encode_texts(tokenizer, texts, limit, add_special_tokens=True)
        )
        return [PooledInput(token_ids, params) for token_ids in encoded]

    async def scores(self, outputs: Sequence[PooledValues], num_first: int) -> list[float]:
        first, second = outputs[:num_first], outputs[num_first:]
        return await asyncio.to_thread(cosines, first, second)


class LateInteraction(BiEncoder):
    """ColBERT (Khattab and Zaharia, 2020): the sum, over the query's tokens, of the largest cosine with a token of the
    document."""

    task = PoolingTask.TOKEN_EMBED

    def __init__(self, model: ServedModel, limit: Limit) -> None:
        super().__init__(model, limit)
        self._rules = model.tokenizer.late_interaction
        self._query_length = min(self._rules.query_length, model.info.max_model_len)

    async def inputs(self, first: Sequence[str], second: Sequence[str]) -> list[PooledInput]:
        limits = [each for each in (self._limit.max_tokens, self._query_length or None) if each is not None]
        of_queries = Limit(min(limits, default=None), self._limit.side)
        queries = await self._read([self._rules.query_prefix + text for text in first], of_queries)
        documents = await self._read([self._rules.document_prefix + text for text in second], self._limit)
        return [*map(self._expanded, queries), *documents]

    def _expanded(self, query: PooledInput) -> PooledInput:
        size, rules = len(query.token_ids), self._rules
        if not 0 < size < self._query_length:
            return query
        token_ids = array("I", [*query.token_ids, *[rules.expansion_id] * (self._query_length - size)])
        start = None if rules.attends_to_expansion else size
        return PooledInput(token_ids, replace(query.params, expansion_start=start))

    async def scores(self, outputs: Sequence[PooledValues], num_first: int) -> list[float]:
        first, second = outputs[:num_first], outputs[num_first:]
        return await max_sims(first, second)


def cosines(first: Sequence[PooledValues], second: Sequence[PooledValues]) -> list[float]:
    """Return the products of embeddings of length 1. `first` has one, or as many as `second`."""
    pairs = _pairs(first, second)
    return [
        float(np.dot(numbers(each.values).astype(np.float64), numbers(other.values).astype(np.float64)))
        for each, other in pairs
    ]


async def max_sims(first: Sequence[PooledValues], second: Sequence[PooledValues]) -> list[float]:
    """Return `max_sim` of each pair. `first` has one query, or as many as `second`."""
    return [await asyncio.to_thread(max_sim, query, document) for query, document in _pairs(first, second)]


def max_sim(query: PooledValues, document: PooledValues) -> float:
    """Return the sum, over the query's rows, of the largest product with a row of the document."""
    return sum(
        float(np.max([np.max(part @ other.T, axis=1) for other in _parts(document)], axis=0).sum())
        for part in _parts(query)
    )


def _parts(output: PooledValues) -> Iterator[NDArray[np.float64]]:
    rows = matrix(output)
    for start in range(0, len(rows), _ROWS):
        yield rows[start : start + _ROWS].astype(np.float64)


def _pairs(
    first: Sequence[PooledValues], second: Sequence[PooledValues]
) -> Iterator[tuple[PooledValues, PooledValues]]:
    return zip(first if len(first) == len(second) else repeat(first[0], len(second)), second, strict=True)


def _single(output: PooledValues) -> float:
    values = numbers(output.values)
    if len(values) != 1:
        raise GenerationFailed(f"the model has {len(values)} values for a pair, not one")
    return float(values[0])


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def answers_yes_or_no(model: ServedModel) -> bool:
    """Whether the model scores documents by the probability of "yes": its name or path says so, or its chat template
    has that model's sentence."""
    names = f"{model.info.model} {model.info.model_name}".lower().replace("_", "-")
    return _NAME in names or _QUESTION in str(model.tokenizer.info.get("chat_template", ""))


def encode_prompts(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], instruction: str | None, limit: Limit
) -> list[Sequence[int]]:
    """Return the prompt of each pair. Only the query and the document are truncated. A query that begins with the
    prompt's opening, as clients of vLLM send it, already is the whole prompt; its document is appended."""
    texts = [_text(query, document, instruction) for query, document in pairs]
    before, after = (each.ids for each in tokenizer.encode_batch_fast([_BEFORE, _AFTER], add_special_tokens=False))
    groups = in_groups(texts, len)
    encodings = (each for group in groups for each in tokenizer.encode_batch_fast(group, add_special_tokens=False))
    whole = [query.startswith(_OPENING) for query, _ in pairs]
    return [
        array("I", limit.cut(encoding.ids))
        if is_whole
        else array("I", [*before, *limit.cut(encoding.ids, len(before) + len(after)), *after])
        for encoding, is_whole in zip(encodings, whole, strict=True)
    ]


def _text(query: str, document: str, instruction: str | None) -> str:
    if query.startswith(_OPENING):
        return query + document
    return f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
