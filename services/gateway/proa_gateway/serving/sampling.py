"""Request fields to what generation needs: sampling parameters for the engine, a text stream for the output.

Unset fields get the model's defaults, words become token ids, and values are checked against the model's limits.
"""

import secrets
from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

from proa.contract import ModelInfo, SamplingParams
from proa.sampling import choice_key
from proa.text import TextStream
from proa_gateway.engines.models import ServedModel
from proa_gateway.errors import InvalidRequest, UnsupportedTask
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.prompt import check_token_ids
from proa_gateway.tokenizer import Tokenizer

T = TypeVar("T")
MAX_LISTED_IDS = 1_000_000
MAX_BAD_CHARACTERS = 4096  # which take 2 ms to encode
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
        _check_list(name, getattr(request, name) or (), num_choices, model.info)
    check_token_ids("logit_bias", [int(key) for key in request.logit_bias or ()], model.info)
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
    seed = secrets.randbits(64) if request.seed is None else request.seed
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
    """Each choice is a request to an engine, which gets the list."""
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
