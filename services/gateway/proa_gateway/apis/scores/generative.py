"""Scores of items by the probability of a token behind the query and the item, of models that generate text."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from proa.contract import PoolingParams, PoolingTask
from proa_gateway.apis.scores.job import render_scores
from proa_gateway.apis.scores.protocol import GenerativeScoringRequest
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.streaming import Content
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.fields import REFUSED_IN_GENERATIVE_SCORING
from proa_gateway.pooling.inputs import Limit, PooledInput, check_task, read_texts
from proa_gateway.pooling.job import PooledCall, PooledEnvelope, PooledWork, pooled_call
from proa_gateway.pooling.values import numbers
from proa_gateway.serving.generation_request import check_token_ids
from proa_gateway.serving.job import ApiSettings, Endpoint

GENERATIVE_SCORING: Final = Endpoint(
    "/generative_scoring", "score", "generative-scoring-", REFUSED_IN_GENERATIVE_SCORING
)


def generative_scoring_call(body: GenerativeScoringRequest, settings: ApiSettings) -> PooledCall:
    read = partial(_read, body, settings.max_pooling_tokens)
    return pooled_call(GENERATIVE_SCORING, body, settings, read, num_inputs=len(body.items), param="items")


async def _read(body: GenerativeScoringRequest, max_tokens: int, model: ServedModel) -> PooledWork:
    check_task(PoolingTask.TOKEN_LOGPROBS, model.info)
    check_token_ids("label_token_ids", body.label_token_ids, model.info)
    (query,) = await _token_ids("query", body.query, model, add_special_tokens=body.add_special_tokens)
    items = await _token_ids("items", body.items, model, add_special_tokens=False)
    num_tokens = len(query) * len(items) + sum(map(len, items))
    if num_tokens > max_tokens:  # before each item gets the query's tokens
        message = f"{num_tokens} tokens are above the limit of {max_tokens} in one request."
        raise InvalidRequest(message, param="items")
    prompts = [item + query if body.item_first else query + item for item in items]
    labels = tuple(dict.fromkeys(body.label_token_ids))
    params = PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=labels)
    return PooledWork([PooledInput(each, params) for each in prompts], partial(_render, body.apply_softmax))


async def _token_ids(
    param: str, prompts: Sequence[str | list[int]], model: ServedModel, *, add_special_tokens: bool
) -> "list[array[int]]":
    texts = [each for each in prompts if isinstance(each, str)]
    encoded = iter(await read_texts(texts, model, Limit(), add_special_tokens=add_special_tokens, param=param))
    for each in prompts:
        if not isinstance(each, str):
            check_token_ids(param, each, model.info)
    return [array("I", next(encoded) if isinstance(each, str) else each) for each in prompts]


async def _render(apply_softmax: bool, outputs: Sequence[PooledValues], envelope: PooledEnvelope) -> Content:
    return render_scores([_score(numbers(output.values), apply_softmax) for output in outputs], envelope)


def _score(logprobs: np.ndarray, apply_softmax: bool) -> float:
    """The probability of the first label. `logprobs`: of the labels among all tokens."""
    probabilities = np.exp(logprobs.astype(np.float64) - (logprobs.max() if apply_softmax else 0))
    return float(probabilities[0] / (probabilities.sum() if apply_softmax else 1))
