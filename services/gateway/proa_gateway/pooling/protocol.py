"""Bodies of the pooling endpoints: OpenAI's fields of embeddings, and those of vLLM, Jina and Cohere."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.openai.fields import MAX_PROMPTS, Prompts, TemplateVariables, Text, at_most
from proa_gateway.openai.protocol import Count, Messages, ModelName, Name, RequestId
from proa_gateway.pooling.fields import ScoredText, ScoredTexts
from proa_gateway.pooling.number_formats import Endianness, NumberFormat

CohereType = Literal["float", "base64", "binary", "ubinary"]
TokenLimit = Annotated[int, Field(ge=0, lt=2**31)]
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that the two sides of a score request may have."""
SCORE_FIELDS = frozenset(name for names in _PAIRS for name in names)

RepeatedText = Annotated[Text, at_most(4 * 2**20)]
"""A text that the response has too."""


class PoolingFields(BaseModel):
    """The fields that all pooling endpoints have."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())
    __pydantic_extra__: dict[str, Any]

    model: ModelName | None = Field(None, description="May be omitted if only one model is served.")
    user: Name | None = Field(None, description="Routed as one session, unless another field names one.")
    request_id: RequestId | None = Field(None, description="Used in the response's id. The header comes first.")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Name | None = None
    session_id: Name | None = Field(None, description="Requests of a session prefer the engine of its last one.")

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields that the class does not have."""
        return self.__pydantic_extra__


class TruncatedFields(PoolingFields):
    """Which tokens of each input are kept, in vLLM's words."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Tokens of each input to keep. -1: as many as the model takes."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Default: right, the first are kept.")


class InputFields(TruncatedFields):
    """Either `input` has the inputs, or `messages` one chat; the fields after it are the chat template's."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["input"]}, {"required": ["messages"]}]})

    input: Prompts | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for texts, false for a chat.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Text | None = Field(None, description="Needs a gateway with --trust-request-chat-template.")
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _check_input(self) -> "InputFields":
        if (self.input is None) == (self.messages is None):
            raise PydanticCustomError("invalid_value", "must have either input or messages")
        return self


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


class ScoringFields(TruncatedFields):
    use_activation: bool | None = Field(None, description="False: the score is not made a probability.")
    max_tokens_per_query: TokenLimit | None = Field(None, description="0: all.")
    max_tokens_per_doc: TokenLimit | None = Field(None, description="0: all.")
    instruction: Text | None = Field(None, description="The task, for models whose template has one.")
    chat_template_kwargs: TemplateVariables | None = Field(None, description="Its `instruction` comes first.")

    @property
    def task_instruction(self) -> str | None:
        given = (self.chat_template_kwargs or {}).get("instruction")
        return given if isinstance(given, str) else self.instruction

    @property
    def extra_fields(self) -> dict[str, Any]:
        variables = (self.chat_template_kwargs or {}).items()
        unused = {f"chat_template_kwargs.{name}": value for name, value in variables if name != "instruction"}
        return self.__pydantic_extra__ | unused


class ScoreRequest(ScoringFields):
    """`POST /score`. The two sides have as many texts, or the first has one."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": list(names)} for names in _PAIRS]})

    text_1: ScoredTexts | None = None
    text_2: ScoredTexts | None = None
    queries: ScoredTexts | None = None
    documents: ScoredTexts | None = None
    items: ScoredTexts | None = None
    data_1: ScoredTexts | None = None
    data_2: ScoredTexts | None = None

    @model_validator(mode="after")
    def _check_sides(self) -> "ScoreRequest":
        first, second = self.sides
        if len(first) not in (1, len(second)):
            message = "must have one text on the first side, or as many as on the second"
            raise PydanticCustomError("invalid_value", message)
        return self

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        first, second = self.side_names
        return getattr(self, first), getattr(self, second)

    @property
    def side_names(self) -> tuple[str, str]:
        given = {name for name in SCORE_FIELDS if getattr(self, name) is not None}
        for names in _PAIRS:
            if given == set(names):
                return names
        listed = ", ".join(" and ".join(names) for names in _PAIRS)
        raise PydanticCustomError("invalid_value", "must have exactly one of: {names}", {"names": listed})


class RerankRequest(ScoringFields):
    """`POST /rerank`, in the form of Jina and Cohere."""

    query: ScoredText
    documents: ScoredTexts
    top_n: TokenLimit | None = Field(None, description="How many results are returned. 0: all, the default.")
    return_documents: bool | None = Field(None, description="False: the results do not have their texts.")
