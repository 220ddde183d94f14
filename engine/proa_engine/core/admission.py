"""Admission: whether a request fits the model's context and the KV cache, and at which length it must end."""

from dataclasses import dataclass

from proa.contract import EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Limits:
    max_model_len: int  # tokens of the model's context
    cache_capacity: int  # tokens that the whole KV cache holds


def max_num_tokens(request: EngineCoreRequest, limits: Limits) -> int:
    """The number of tokens, prompt and output together, at which the request ends.

    The KV cache limits it as the model's context does, but one token later, since the last token is never computed. So
    a request that has the whole cache to itself always finishes. Not for pooled requests.
    """
    limit = min(limits.max_model_len, limits.cache_capacity + 1)
    max_tokens = request.sampling_params.max_tokens
    return limit if max_tokens is None else min(limit, len(request.prompt_token_ids) + max_tokens)


def refusal(request: EngineCoreRequest, limits: Limits) -> str | None:
    """Why the request can never be served, as a sentence for the user; None if it can."""
    num_prompt, num_resumed = len(request.prompt_token_ids), len(request.resumed_token_ids)
    if num_prompt == 0:
        return "the prompt must hold at least one token"
    known = f"the prompt's {num_prompt} tokens"
    if num_resumed:
        known += f" and the {num_resumed} already generated"
    if request.pooling_params is not None:
        if num_prompt > limits.max_model_len:
            return f"{known} exceed the context of {limits.max_model_len} tokens"
    elif num_prompt + num_resumed >= limits.max_model_len:
        return f"{known} leave no room for an output in the context of {limits.max_model_len} tokens"
    if num_prompt + num_resumed > limits.cache_capacity:
        return f"{known} exceed the engine's KV cache, which holds {limits.cache_capacity} tokens"
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is not None and num_resumed >= max_tokens:
        return f"max_tokens ({max_tokens}) leaves no token to generate after the {num_resumed} already generated"
    return None
