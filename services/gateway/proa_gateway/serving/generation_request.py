"""GenerationRequest: the fields that all APIs of generated text share, with OpenAI's and vLLM's names.

Values are coerced as vLLM does: 5.0 and "5" are integers. Other fields are refused or ignored (`refused_fields.py`).
"""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from proa.contract.sampling_params import MAX_LOGPROB_TOKEN_IDS
from proa.text import Vocabulary
from proa_gateway.http.middleware import REQUEST_ID
from proa_gateway.serving.fields import (
    LogitBias,
    RepetitionDetection,
    Strings,
    Text,
    at_most,
)
from proa_gateway.serving.logprobs import ChatLogprobs, TokenName, chat_logprobs, token_names
from proa_gateway.serving.structured_outputs import ConstraintFields

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MAX_THINKING_TOKENS = 1_000_000
Count = Annotated[int, Field(ge=1, lt=2**31)]
NumTokens = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
NumLogprobs = Annotated[int, Field(ge=-1, lt=2**31, description="-1: the whole vocabulary.")]
Name = Annotated[str, Field(max_length=256), at_most(256)]
ModelName = Annotated[Text, Field(max_length=1024), at_most(1024)]
RequestId = Annotated[str, Field(pattern=f"^{REQUEST_ID}$"), at_most(128)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=327_680, fail_fast=True)]
"""At most those of a large vocabulary."""


class StreamOptions(BaseModel):
    """`include_usage`: usage in a last event. With it, `continuous_usage_stats`: the usage so far in every event."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Any]

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="No effect: events are not padded.")


class SamplingParameters(BaseModel):
    """Sampling parameters that have one name in OpenAI's, vLLM's and SGLang's APIs. None: the model's default."""

    n: Count | None = None
    stop: Strings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    logit_bias: LogitBias | None = None


class GenerationRequest(SamplingParameters, ConstraintFields):
    """The fields that all generation endpoints have. None: the default; for sampling parameters the model's."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())
    __pydantic_extra__: dict[str, Any]

    model: ModelName | None = Field(None, description="May be omitted if only one model is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    max_tokens: NumTokens | None = None
    user: Name | None = Field(None, description="Routed as one session, unless another field names one.")

    # vLLM's extra fields
    min_tokens: NumTokens | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Strings | None = None
    logprob_token_ids: Annotated[TokenIds, Field(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = Field(
        None, description="Tokens of the log probabilities, in place of the likeliest ones."
    )
    prompt_logprobs: NumLogprobs | None = None
    repetition_detection: RepetitionDetection | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Name | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Tokens of the prompt to keep. -1: as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Default: left, the last are kept.")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: Count | None = Field(None, description="Tokens in an event, if more than the gateway's.")
    request_id: RequestId | None = Field(None, description="Used in the response's id. The header comes first.")
    session_id: Name | None = Field(None, description="Requests of a session prefer the engine of its last one.")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def token_names(self, vocabulary: Vocabulary, *, as_ids: bool) -> TokenName:
        """What tokens are called in log probabilities. `as_ids`: by their ids, unless the request says otherwise."""
        given = self.return_tokens_as_token_ids
        return token_names(vocabulary, as_token_ids=as_ids if given is None else given)

    def chat_logprobs(self, vocabulary: Vocabulary, *, as_ids: bool) -> ChatLogprobs:
        """Log probabilities in OpenAI's form for chats: beside tokens that the request names, of the sampled one."""
        name, named = self.token_names(vocabulary, as_ids=as_ids), bool(self.logprob_token_ids)
        return partial(chat_logprobs, vocabulary=vocabulary, name=name, adds_sampled=named)

    def check(self) -> None:
        """Check fields that depend on each other. Raises `InvalidRequest`."""

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields that this class and those of its fields do not have, by their path in the body."""
        extra: dict[str, Any] = {}
        models: list[tuple[str, BaseModel]] = [("", self)]
        for path, model in models:  # which grows
            extra |= {f"{path}{name}": value for name, value in (model.__pydantic_extra__ or {}).items()}
            values = ((name, getattr(model, name)) for name in type(model).model_fields)
            models += [(f"{path}{name}.", value) for name, value in values if isinstance(value, BaseModel)]
        return extra
