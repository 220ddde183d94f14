"""GenerationRequest: the fields that all APIs of generated text share, by OpenAI's and vLLM's names, and the
`SamplingParams` and `TextStream` that they make.

Values are coerced as vLLM does: 5.0 and "5" are integers. Other fields are refused or ignored (`ignored_fields.py`).
Unset fields get the model's defaults, words become token ids, and values are checked against the model's limits.
"""

import secrets
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from proa.contract import ModelInfo, SamplingParams, choice_key
from proa.contract.sampling_params import MAX_LOGPROB_TOKEN_IDS
from proa.text import TextStream, Vocabulary
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedTask
from proa_gateway.serving.fields import (
    Count,
    LogitBias,
    NumLogprobs,
    NumTokens,
    Penalty,
    Probability,
    RepetitionDetection,
    RequestFields,
    Seed,
    Strings,
    TokenIds,
)
from proa_gateway.serving.logprobs import ChatLogprobs, TokenName, chat_logprobs, token_names
from proa_gateway.serving.structured_outputs import ConstraintFields
from proa_gateway.tokenizer import Tokenizer

T = TypeVar("T")
MAX_LISTED_IDS = 1_000_000
MAX_BAD_CHARACTERS = 4096  # which take 2 ms to encode


class StreamOptions(BaseModel):
    """`include_usage`: usage in a last event. With it, `continuous_usage_stats`: the usage so far in every event."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Any]

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="No effect: events are not padded.")

    @property
    def changes_stream(self) -> bool:
        """Whether an option is set to more than its default. Options without effect count too."""
        return any(self.model_dump().values())


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


class GenerationRequest(SamplingParameters, ConstraintFields, RequestFields):
    """The fields that all generation endpoints have. None: the default; for sampling parameters the model's."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    max_tokens: NumTokens | None = None

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
    speculative: bool | None = Field(None, description="False: no draft tokens are verified, which change no output.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Tokens of the prompt to keep. -1: as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Default: left, the last are kept.")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: Count | None = Field(None, description="Tokens in an event, if more than the gateway's.")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def token_names(self, vocabulary: Vocabulary, *, as_ids: bool, shows_bytes: bool = False) -> TokenName:
        """Return the function that names tokens in log probabilities. `as_ids`: name them by their ids, unless the
        request says otherwise. `shows_bytes`: as for `logprobs.token_names`."""
        given = self.return_tokens_as_token_ids
        return token_names(vocabulary, as_token_ids=as_ids if given is None else given, shows_bytes=shows_bytes)

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


def check_token_ids(param: str, token_ids: Sequence[int], model: ModelInfo) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < model.vocab_size:
            message = f"{param}: token id {token_id} is out of vocabulary: the model has {model.vocab_size} tokens."
            raise InvalidRequest(message, param=param)


# The parameters that a request and `SamplingParams` share.
_SHARED = tuple(field.name for field in fields(SamplingParams) if field.name in GenerationRequest.model_fields)


def sampling_params(
    request: GenerationRequest,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> list[SamplingParams]:
    """One for each of the request's `n` choices; they differ in their keys. Raises `InvalidRequest`, `UnsupportedTask`.

    `max_tokens` None: up to the end of the context. `logprobs` None: none; else how many likeliest tokens beside the
    sampled one.
    """
    if model.info.pooling_only:
        raise UnsupportedTask(f"The model {model.name!r} generates no text.", param="model")
    num_choices = request.n or 1
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        if token_ids := getattr(request, name):
            _check_list(name, token_ids, num_choices, model.info)
    if request.logit_bias:
        check_token_ids("logit_bias", [int(key) for key in request.logit_bias], model.info)
    if request.logprob_token_ids and logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs.", param="logprob_token_ids")
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        message = f"min_tokens must not be above max_tokens ({max_tokens}), got {min_tokens}."
        raise InvalidRequest(message, param="min_tokens")
    words = request.bad_words or ()  # few enough to be encoded at once
    if sum(map(len, words)) > MAX_BAD_CHARACTERS:
        message = f"bad_words must not have more than {MAX_BAD_CHARACTERS:,} characters in all."
        raise InvalidRequest(message, param="bad_words")
    values = model.tokenizer.sampling_defaults | {
        name: value for name in _SHARED if (value := getattr(request, name)) is not None
    }
    values |= {"max_tokens": max_tokens, "logprobs": logprobs}
    values["prompt_logprobs"] = num_logprobs("prompt_logprobs", prompt_logprobs, model.info)
    values["bad_words_token_ids"] = [ids for word in words for ids in _bad_word_ids(word, model.tokenizer)]
    try:
        params = SamplingParams(**values)
    except ValueError as error:  # the request's own values are in range, the model's defaults may not be
        raise InvalidRequest(str(error)) from None
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return [params.with_key(choice_key(seed, index)) for index in range(num_choices)]


def text_stream(request: GenerationRequest, model: ServedModel, *, context: Sequence[int] = ()) -> TextStream:
    """`context`: the token ids that the output continues, if its text continues theirs."""
    return TextStream(
        model.tokenizer.vocabulary,
        stop=request.stop or (),
        include_stop_str_in_output=request.include_stop_str_in_output or False,
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
        context=context,
    )


def check_max_tokens(max_tokens: int | None, *, echo: bool = False) -> None:
    if max_tokens == 0 and not echo:
        message = "max_tokens must be at least 1; 0 is for completions with echo, which then score their prompt."
        raise InvalidRequest(message, param="max_tokens")


def num_logprobs(param: str, value: int | None, model: ModelInfo) -> int | None:
    """The number of likeliest tokens; -1 stands for the whole vocabulary. Raises `InvalidRequest`."""
    if value is None:
        return None
    count = model.vocab_size if value < 0 else value
    if count > model.max_logprobs:
        message = f"{param} must not be above {model.max_logprobs}, got {count}; the engine's --max-logprobs limits it."
        raise InvalidRequest(message, param=param)
    return count


def given(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_list(param: str, token_ids: Sequence[int], num_choices: int, model: ModelInfo) -> None:
    """Raise `InvalidRequest` for a list that is too long. Each choice is a request to an engine, which gets the
    list."""
    if len(token_ids) > model.vocab_size:
        message = f"{param} must not have more token ids than the model has tokens, {model.vocab_size}."
        raise InvalidRequest(message, param=param)
    if len(token_ids) * num_choices > MAX_LISTED_IDS:
        message = f"{param} must not have more than {MAX_LISTED_IDS:,} token ids in all n choices."
        raise InvalidRequest(message, param=param)
    check_token_ids(param, token_ids, model)


def _bad_word_ids(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The word's token ids at the start of a text and after a space."""
    bare = word.lstrip(" ")
    spellings = (tokenizer.encode_now(text, add_special_tokens=False) for text in (bare, f" {bare}") if bare)
    unique = {tuple(ids): ids for ids in spellings if ids}
    return list(unique.values())
