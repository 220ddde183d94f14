"""The bodies of the endpoints that return a model's values: OpenAI's, vLLM's and Cohere's."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.pooling.encoder import Endianness, NumberFormat
from proa_gateway.pooling.fields import ApiVersion, InputFields, PooledList, PoolingFields, ScoredText
from proa_gateway.serving.fields import MAX_PROMPTS, Count, Name, Text, at_most

CohereType = Literal["float", "base64", "binary", "ubinary"]

RepeatedText = Annotated[Text, at_most(4 * 2**20)]
"""A text that the response has too."""

BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
"""The response with the formats `bytes` and `bytes_only`."""


class ValueFields(InputFields):
    """How values are computed and written."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = Field(
        None, description="bytes: the values are the response's body, and JSON in the header `metadata` the rest."
    )
    embed_dtype: NumberFormat | None = Field(None, description="Of base64 and bytes. Default: float32.")
    dimensions: Count | None = Field(None, description="Leading values of each embedding to keep.")
    use_activation: bool | None = Field(None, description="False: embeddings are not normalised to length 1.")
    normalize: bool | None = Field(None, description="As `use_activation`, which comes first.")
    endianness: Endianness | None = Field(None, description="Of base64 and bytes. Default: little.")

    @property
    def activation(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation


class LateChunkingParams(BaseModel):
    model_config = ConfigDict(extra="forbid")

    chunk_size: Annotated[int, Field(ge=1, lt=2**63, strict=True, description="Tokens.")]


class EmbeddingRequest(ValueFields):
    """`POST /v1/embeddings`."""

    late_chunking_params: LateChunkingParams | None = Field(
        None, description="An embedding for every chunk of each text, instead of one of the text."
    )


class PoolingRequest(ValueFields):
    """`POST /pooling`."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        None, description="Default: the first of token_embed, embed and classify that the model has."
    )


class CohereEmbedRequest(PoolingFields):
    """`POST /v2/embed`, in Cohere's form. The inputs are in one of `texts` and `inputs`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["texts"]}, {"required": ["inputs"]}]})

    texts: Annotated[list[RepeatedText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    inputs: Annotated[list[ScoredText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] | None = Field(
        None, description="Each with a `content` of one part, a text."
    )
    input_type: Name | None = Field(None, description="A prompt of the model's, which is put before each text.")
    embedding_types: Annotated[list[CohereType], Field(min_length=1, max_length=16, fail_fast=True)] | None = Field(
        None, description="Default: float. binary and ubinary are the signs, eight in a number."
    )
    output_dimension: Count | None = Field(None, description="Leading values of each embedding to keep.")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="Where an input that is too long is cut. NONE: it is an error. Default: END."
    )
    max_tokens: Count | None = Field(None, description="Tokens of each input to keep. Default: the model's context.")

    @model_validator(mode="after")
    def _check_inputs(self) -> "CohereEmbedRequest":
        if (self.texts is None) == (self.inputs is None):
            raise PydanticCustomError("invalid_value", "must have either texts or inputs")
        return self


class ClassifyRequest(InputFields):
    """`POST /classify`."""

    use_activation: bool | None = Field(None, description="False: the values are not made probabilities.")


Number = float  # a class below has a field of the type's name
Values = list[float] | str
"""Numbers, or base64 of float32."""


class LateChunk(BaseModel):
    """The place of a chunk. `token_range` and `char_range`: the first token or character, and the one after the last.
    `char_range` is None if the chunk has only tokens that the tokenizer adds."""

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


class LateChunks(BaseModel):
    strategy: Literal["fixed_tokens"]
    chunk_size: int  # tokens of a chunk; the last one may have fewer
    input_tokens: int  # of all chunks
    chunks: list[LateChunk]


class Embedding(BaseModel):
    """`embedding`: a list for each chunk with `late_chunking`, for each token of models that only embed tokens."""

    index: int  # of the input, like that of other results
    object: Literal["embedding"]
    embedding: Values | list[list[float]]
    late_chunking: LateChunks | None = None


class EmbeddingList(PooledList):
    data: list[Embedding]


class PooledData(BaseModel):
    """`data`: a list for each token with the task token_embed."""

    index: int
    object: Literal["pooling"]
    data: Values | list[list[float]]


class PoolingList(PooledList):
    data: list[PooledData]


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
    probs: list[float]  # one for each class
    num_classes: int


class ClassList(PooledList):
    data: list[Classes]
