"""Responses of the pooling endpoints, for the OpenAPI document. The handlers write them without these classes."""

from typing import Literal

from pydantic import BaseModel

from proa_gateway.openai.response_schema import UsageInfo

Values = list[float] | str
"""Numbers, or base64 of float32."""


class _List(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: UsageInfo


class Embedding(BaseModel):
    index: int
    object: Literal["embedding"]
    embedding: Values


class EmbeddingList(_List):
    data: list[Embedding]


class PooledData(BaseModel):
    """`data`: a list for each token with the task token_embed."""

    index: int
    object: Literal["pooling"]
    data: Values | list[list[float]]


class PoolingList(_List):
    data: list[PooledData]


class Classes(BaseModel):
    """`label`: the likeliest."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassList(_List):
    data: list[Classes]


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(_List):
    data: list[Score]


class Document(BaseModel):
    text: str
    multi_modal: None


class RankedDocument(BaseModel):
    index: int
    document: Document | None = None
    relevance_score: float


class RerankUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class ApiVersion(BaseModel):
    version: str


class TokenCounts(BaseModel):
    input_tokens: int


class Meta(BaseModel):
    """Cohere's."""

    api_version: ApiVersion
    tokens: TokenCounts


class RankedDocuments(BaseModel):
    """`results`: the highest score first."""

    id: str
    model: str
    usage: RerankUsage
    meta: Meta
    results: list[RankedDocument]
