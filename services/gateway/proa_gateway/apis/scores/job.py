"""Scores of pairs of texts, in their order or sorted."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import orjson

from proa_gateway.apis.scores.protocol import RerankRequest, ScoreRequest, ScoringFields
from proa_gateway.apis.scores.scorers import Scorer, choose_scorer, shortened
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.streaming import Content
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.fields import REFUSED_IN_SCORES
from proa_gateway.pooling.inputs import Limit, fitting_texts, limit_of
from proa_gateway.pooling.job import PooledCall, PooledEnvelope, PooledWork, pooled_call
from proa_gateway.serving.job import ApiSettings, Endpoint

SCORE = Endpoint("/score", "score", "score-", REFUSED_IN_SCORES)
RERANK = Endpoint("/rerank", "rerank", "score-", REFUSED_IN_SCORES)
MAX_CHARACTERS: Final = 32 * 2**20  # of all pairs
RenderScores = Callable[[Sequence[float], PooledEnvelope], Content]


def score_call(body: ScoreRequest, settings: ApiSettings) -> PooledCall:
    first, second = body.sides
    param = body.side_names[1]
    read = partial(_read_pairs, body, first, second, param, render_scores)
    return pooled_call(SCORE, body, settings, read, num_inputs=len(first) + len(second), param=param)


def rerank_call(body: RerankRequest, settings: ApiSettings) -> PooledCall:
    """Make the call of a rerank request. The documents with the highest scores come first."""
    read = partial(_read_pairs, body, [body.query], body.documents, "documents", partial(render_ranking, body))
    return pooled_call(RERANK, body, settings, read, num_inputs=1 + len(body.documents), param="documents")


async def _read_pairs(
    body: ScoringFields, first: list[str], second: list[str], param: str, render: RenderScores, model: ServedModel
) -> PooledWork:
    scorer = choose_scorer(model, body)
    first = await _fitting(first, body.max_tokens_per_query, body, model, param)
    second = await _fitting(second, body.max_tokens_per_doc, body, model, param)
    num_characters = sum(map(len, second)) + len(first[0]) * (len(second) if len(first) == 1 else 1)
    if num_characters > MAX_CHARACTERS:
        message = f"The pairs have {num_characters} characters; the limit is {MAX_CHARACTERS}."
        raise InvalidRequest(message, param=param)
    return PooledWork(await scorer.inputs(first, second), partial(_render, scorer, len(first), render))


async def _fitting(
    texts: list[str], num_tokens: int | None, body: ScoringFields, model: ServedModel, param: str
) -> list[str]:
    """Return the texts without the parts that truncation would remove in any case."""
    limit = limit_of(body, model.info)
    if num_tokens:
        limit = Limit(min(num_tokens, limit.max_tokens or num_tokens))
    fitting = await fitting_texts(texts, model, limit, model.info.max_model_len, param)
    return await shortened(list(fitting), num_tokens, model)


async def _render(
    scorer: Scorer, num_first: int, render: RenderScores, outputs: Sequence[PooledValues], envelope: PooledEnvelope
) -> Content:
    return render(await scorer.scores(outputs, num_first), envelope)


def render_scores(scores: Sequence[float], envelope: PooledEnvelope) -> Content:
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return envelope.list_of(orjson.dumps(data))


def render_ranking(body: RerankRequest, scores: Sequence[float], envelope: PooledEnvelope) -> Content:
    def result(index: int) -> dict[str, Any]:
        document = {"document": {"text": body.documents[index], "multi_modal": None}}
        shown = document if body.return_documents is not False else {}
        return {"index": index, **shown, "relevance_score": scores[index]}

    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    num_tokens = envelope.usage.prompt_tokens
    response = {
        "id": envelope.id,
        "model": envelope.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": num_tokens}},
        "results": [result(index) for index in order[: body.top_n or len(body.documents)]],
    }
    return Content(orjson.dumps(response))
