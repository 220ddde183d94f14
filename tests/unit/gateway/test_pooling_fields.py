"""docs/pooling.md says what the gateway does with each field, and has all fields of OpenAI's client."""

import re
from collections.abc import Mapping
from pathlib import Path

from openai.types.embedding_create_params import EmbeddingCreateParams

from proa_gateway.apis.embeddings.protocol import ClassifyRequest, CohereEmbedRequest, EmbeddingRequest, PoolingRequest
from proa_gateway.apis.scores.protocol import GenerativeScoringRequest, RerankRequest, ScoreRequest
from proa_gateway.pooling.fields import (
    REFUSED_IN_CLASSIFY,
    REFUSED_IN_COHERE_EMBED,
    REFUSED_IN_EMBEDDINGS,
    REFUSED_IN_GENERATIVE_SCORING,
    REFUSED_IN_POOLING,
    REFUSED_IN_SCORES,
    PoolingFields,
)
from proa_gateway.serving.ignored_fields import NO_EFFECT, Refused

PAGE = Path(__file__).parents[3] / "docs" / "pooling.md"
ROW = re.compile(r"^\| `(\w+)` \|" + r" (.+?) \|" * 7 + r" (.*)\|$", re.MULTILINE)
DOCUMENTED = {name: (outcomes, note.strip()) for name, *outcomes, note in ROW.findall(PAGE.read_text())}
ENDPOINTS: list[tuple[type[PoolingFields], Mapping[str, Refused]]] = [
    (EmbeddingRequest, REFUSED_IN_EMBEDDINGS),
    (PoolingRequest, REFUSED_IN_POOLING),
    (CohereEmbedRequest, REFUSED_IN_COHERE_EMBED),
    (ClassifyRequest, REFUSED_IN_CLASSIFY),
    (ScoreRequest, REFUSED_IN_SCORES),
    (RerankRequest, REFUSED_IN_SCORES),
    (GenerativeScoringRequest, REFUSED_IN_GENERATIVE_SCORING),
]


def outcome(name: str, model: type[PoolingFields], refused: Mapping[str, Refused]) -> str:
    if name in model.model_fields:
        return "works"
    return "refused" if name in refused else "ignored"


def test_every_field_of_openais_client_works() -> None:
    assert EmbeddingCreateParams.__annotations__.keys() <= EmbeddingRequest.model_fields.keys()


def test_the_page_has_the_outcome_of_every_field_and_the_reasons() -> None:
    known = {name for model, refused in ENDPOINTS for name in (*model.model_fields, *refused)}
    assert DOCUMENTED.keys() == known
    for name, (outcomes, note) in DOCUMENTED.items():
        assert outcomes == [outcome(name, *endpoint) for endpoint in ENDPOINTS], name
        for model, refused in ENDPOINTS:
            if outcome(name, model, refused) == "refused":
                assert note.endswith(refused[name].reason), name


def test_a_field_is_supported_refused_or_without_effect_and_only_one_of_them() -> None:
    for model, refused in ENDPOINTS:
        assert not model.model_fields.keys() & (refused.keys() | NO_EFFECT.keys())
        assert not refused.keys() & NO_EFFECT.keys()
