"""Responses of the pooling endpoints, for the OpenAPI document. The handlers write them without these classes."""

from typing import Any, Literal

from pydantic import BaseModel

from proa_gateway.openai.response_schema import UsageInfo

Number = float  # a class below has a field of the type's name
BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
"""The response with the formats `bytes` and `bytes_only`."""
Values = list[float] | str
"""Numbers, or base64 of float32."""


class _List(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: UsageInfo


class LateChunk(BaseModel):
    """Its tokens and characters, each the first and the one behind the last. `char_range` None: it has only tokens that
    the tokenizer adds."""

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


class LateChunks(BaseModel):
    strategy: Literal["fixed_tokens"]
    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]


class Embedding(BaseModel):
    """`embedding`: a list for each chunk with `late_chunking`, for each token of models that only embed tokens."""

    index: int
    object: Literal["embedding"]
    embedding: Values | list[list[float]]
    late_chunking: LateChunks | None = None


class EmbeddingList(_List):
    data: list[Embedding]


class PooledData(BaseModel):
    """`data`: a list for each token with the task token_embed."""

    index: int
    object: Literal["pooling"]
    data: Values | list[list[float]]


class PoolingList(_List):
    data: list[PooledData]


class ApiVersion(BaseModel):
    version: str


class CohereUnits(BaseModel):
    input_tokens: int
    image_tokens: int


class CohereMeta(BaseModel):
    api_version: ApiVersion
    billed_units: CohereUnits


class EmbeddingsByType(BaseModel):
    """The types that were asked for."""

    float: list[list[Number]] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbeddings(BaseModel):
    """`texts`: those of the request."""

    id: str
    embeddings: EmbeddingsByType
    texts: list[str] | None = None
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]


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
