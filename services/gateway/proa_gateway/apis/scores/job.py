"""ScoreHandler and RerankHandler: scores of pairs of texts, in their order or sorted."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import orjson

from proa_gateway.apis.scores.protocol import RerankRequest, ScoreRequest, ScoringFields
from proa_gateway.apis.scores.scorers import Scorer, choose_scorer, shortened
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.streaming import Content
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.fields import REFUSED_IN_SCORES
from proa_gateway.pooling.inputs import Limit, PooledInput, fitting_texts, limit_of
from proa_gateway.pooling.serving import Envelope
from proa_gateway.serving.refused_fields import Refused

MAX_CHARACTERS: Final = 32 * 2**20  # of all pairs


class _ScoringHandler(ABC):
    id_prefix: ClassVar[str] = "score-"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_SCORES
    input_param: str

    def __init__(self, request: ScoringFields, first: list[str], second: list[str]) -> None:
        self._request = request
        self._first = first
        self._second = second
        self._scorer: Scorer | None = None

    @property
    def request(self) -> ScoringFields:
        return self._request

    @property
    def num_inputs(self) -> int:
        return len(self._first) + len(self._second)

    async def inputs(self, model: ServedModel) -> list[PooledInput]:
        self._scorer = choose_scorer(model, self._request)
        first = await self._fitting(self._first, self._request.max_tokens_per_query, model)
        second = await self._fitting(self._second, self._request.max_tokens_per_doc, model)
        num_characters = sum(map(len, second)) + len(first[0]) * (len(second) if len(first) == 1 else 1)
        if num_characters > MAX_CHARACTERS:
            message = f"The pairs have {num_characters} characters; the limit is {MAX_CHARACTERS}."
            raise InvalidRequest(message, param=self.input_param)
        return await self._scorer.inputs(first, second)

    async def _fitting(self, texts: list[str], num_tokens: int | None, model: ServedModel) -> list[str]:
        limit = limit_of(self._request, model.info)
        if num_tokens:
            limit = Limit(min(num_tokens, limit.max_tokens or num_tokens))
        fitting = await fitting_texts(texts, model, limit, model.info.max_model_len, self.input_param)
        return await shortened(list(fitting), num_tokens, model)

    async def content(self, outputs: Sequence[PooledValues], envelope: Envelope) -> Content:
        assert self._scorer is not None  # `inputs` was called
        return self._response(await self._scorer.scores(outputs), envelope)

    @abstractmethod
    def _response(self, scores: list[float], envelope: Envelope) -> Content: ...


class ScoreHandler(_ScoringHandler):
    """The `PoolingHandler` of `/score`."""

    route: ClassVar[str] = "/score"
    operation: ClassVar[str] = "score"

    def __init__(self, request: ScoreRequest) -> None:
        super().__init__(request, *request.sides)
        self.input_param = request.side_names[1]

    def _response(self, scores: list[float], envelope: Envelope) -> Content:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return envelope.list_of(orjson.dumps(data))


class RerankHandler(_ScoringHandler):
    """The `PoolingHandler` of `/rerank`: the documents with the highest scores first."""

    route: ClassVar[str] = "/rerank"
    operation: ClassVar[str] = "rerank"
    input_param = "documents"

    def __init__(self, request: RerankRequest) -> None:
        super().__init__(request, [request.query], request.documents)
        self._num_results = request.top_n or len(request.documents)
        self._has_documents = request.return_documents is not False

    def _response(self, scores: list[float], envelope: Envelope) -> Content:
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        num_tokens = envelope.usage.prompt_tokens
        body = {
            "id": envelope.id,
            "model": envelope.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": num_tokens}},
            "results": [self._result(index, scores[index]) for index in order[: self._num_results]],
        }
        return Content(orjson.dumps(body))

    def _result(self, index: int, score: float) -> dict[str, Any]:
        document = {"document": {"text": self._second[index], "multi_modal": None}} if self._has_documents else {}
        return {"index": index, **document, "relevance_score": score}
