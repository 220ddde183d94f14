"""From a request's fields to an engine's sampling parameters: defaults filled in, words turned to tokens, limits
checked. Errors say which field is wrong and why.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from proa.sampling import choice_key
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import ContextOverflow, InvalidRequest
from proa_gateway.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from proa_gateway.tokenizer import Tokenizer
from proa_gateway.types import ModelInfo, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
T = TypeVar("T")


def sampling_params(request: ChatCompletionRequest | CompletionRequest, model: ServedModel) -> list[SamplingParams]:
    """One for each of the request's `n` choices; they differ in their keys. Raises `InvalidRequest`."""
    check_token_ids("stop_token_ids", request.stop_token_ids or (), model.info)
    check_token_ids("allowed_token_ids", request.allowed_token_ids or (), model.info)
    check_token_ids("logit_bias", [int(key) for key in request.logit_bias or ()], model.info)
    params = _common(request, model)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        message = f"min_tokens must not be above max_tokens ({params.max_tokens}), got {params.min_tokens}."
        raise InvalidRequest(message, param="min_tokens")
    seed = secrets.randbits(64) if request.seed is None else request.seed
    return [replace(params, key=choice_key(seed, index)) for index in range(request.n or 1)]


def max_tokens(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    """That an engine may generate; None: up to the context's end. It generates one where none is wanted."""
    if isinstance(request, CompletionRequest):
        return max(1, _given(request.max_tokens, DEFAULT_COMPLETION_TOKENS))
    return request.max_completion_tokens or request.max_tokens


def check_context(num_prompt_tokens: int, max_tokens: int | None, model: ServedModel, param: str) -> None:
    """Raises `ContextOverflow`. `param` names the field that holds the prompt."""
    limit = model.info.max_model_len
    if num_prompt_tokens + (max_tokens or 1) <= limit:
        return
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt has {num_prompt_tokens} tokens"
    )
    if max_tokens is not None:
        message += f", and {max_tokens} more are requested for the completion: {num_prompt_tokens + max_tokens} in all"
    raise ContextOverflow(f"{message}. Please reduce the length of the prompt or of the completion.", param=param)


def check_token_ids(name: str, token_ids: Sequence[int], model: ModelInfo) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            message = f"{name}: token id {token_id} is not in the model's vocabulary of {model.vocab_size}."
            raise InvalidRequest(message, param=name)


def _common(request: ChatCompletionRequest | CompletionRequest, model: ServedModel) -> SamplingParams:
    defaults = model.tokenizer.defaults
    return SamplingParams(
        key=0,
        temperature=_given(request.temperature, defaults.temperature),
        top_p=_given(request.top_p, defaults.top_p),
        top_k=max(0, _given(request.top_k, defaults.top_k)),
        min_p=_given(request.min_p, defaults.min_p),
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=request.logit_bias or {},  # type: ignore[arg-type]  # its validator has made the keys integers
        allowed_token_ids=request.allowed_token_ids or (),
        bad_words=[ids for word in request.bad_words or () for ids in _bad_word_ids(word, model.tokenizer)],
        max_tokens=max_tokens(request),
        min_tokens=request.min_tokens or 0,
        stop_token_ids=request.stop_token_ids or (),
        ignore_eos=request.ignore_eos or False,
        logprobs=_logprobs(request, model.info),
        prompt_logprobs=_prompt_logprobs(request, model.info),
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _logprobs(request: ChatCompletionRequest | CompletionRequest, model: ModelInfo) -> int | None:
    if isinstance(request, CompletionRequest):
        return _limited("logprobs", request.logprobs, model)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return _limited("top_logprobs", request.top_logprobs or 0, model) if request.logprobs else None


def _prompt_logprobs(request: GenerationRequest, model: ModelInfo) -> int | None:
    if request.prompt_logprobs is not None:
        return _limited("prompt_logprobs", request.prompt_logprobs, model)
    if isinstance(request, CompletionRequest) and request.echo:
        return request.logprobs
    return None


def _limited(name: str, value: int | None, model: ModelInfo) -> int | None:
    if value is not None and value > model.max_logprobs:
        raise InvalidRequest(f"{name} must not be above {model.max_logprobs}, got {value}.", param=name)
    return value


def _bad_word_ids(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The word as it is spelt at the start of a text and after a space."""
    bare = word.lstrip(" ")
    spellings = (tokenizer.encode_now(text, add_special_tokens=False) for text in (bare, f" {bare}") if bare)
    unique = {tuple(ids): ids for ids in spellings if ids}
    return list(unique.values())
