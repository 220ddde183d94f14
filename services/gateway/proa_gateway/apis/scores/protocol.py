"""The bodies of `/score`, `/rerank` and `/generative_scoring`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.pooling.fields import ApiVersion, PooledList, PoolingFields, ScoredText, ScoredTexts, TruncatedFields
from proa_gateway.serving.fields import Prompts, TemplateVariables, Text

TokenLimit = Annotated[int, Field(ge=0, lt=2**31)]
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that the two sides of a score request may have."""
MAX_LABELS = 1024
SCORE_FIELDS = frozenset(name for names in _PAIRS for name in names)


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


class GenerativeScoringRequest(PoolingFields):
    """`POST /generative_scoring`, vLLM's. The score of an item is the probability of the first label's token behind the
    query and the item."""

    query: Prompts = Field(description="One text, or its token ids.")
    items: Prompts
    label_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_LABELS, fail_fast=True)]
    apply_softmax: bool = Field(True, description="False: the probability among all tokens, not among the labels.")
    item_first: bool = Field(False, description="The query comes behind the item.")
    add_special_tokens: bool = Field(True, description="Those that the tokenizer puts around the query.")

    @model_validator(mode="after")
    def _check_query(self) -> "GenerativeScoringRequest":
        if len(self.query) != 1:
            raise PydanticCustomError("invalid_value", "must have one query")
        return self


class Score(BaseModel):
    index: int  # of the pair
    object: Literal["score"]
    score: float


class ScoreList(PooledList):
    data: list[Score]


class Document(BaseModel):
    text: str
    multi_modal: None


class RankedDocument(BaseModel):
    index: int  # in the request's documents
    document: Document | None = None  # None: `return_documents` is false
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
