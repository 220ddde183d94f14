"""Checks of a request against the model's limits, to be made before it is submitted to the core."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proa.contract import EngineCoreRequest, PoolingTask, SamplingParams

_UNSET = (SamplingParams(), SamplingParams(max_tokens=None))  # the second one is a message without any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    max_logprobs: int = 20
    grammars: bool = False  # whether the engine compiles grammars
    pooling_tasks: frozenset[PoolingTask] = frozenset()
    pooling_only: bool = False  # the model generates no tokens
    embedding_size: int = 0
    max_loras: int = 0  # different adapters in one step; 0: no adapters


def check_request(request: EngineCoreRequest, limits: ModelLimits) -> None:
    """Raises `ValueError` with a sentence for the user if the model cannot serve the request."""
    check_prompt(request.prompt_token_ids, limits, num_output_tokens=0 if request.pooling_params else 1)
    check_sampling_params(request.sampling_params, limits)
    check_resumed(request, limits)
    check_pooling_params(request, limits)
    if request.lora_name and not limits.max_loras:
        raise ValueError("this engine does not support LoRA adapters; start it with --enable-lora")


def check_prompt(prompt_token_ids: Sequence[int], limits: ModelLimits, *, num_output_tokens: int = 1) -> None:
    """Check that the prompt is not empty, has only token ids of the vocabulary, and leaves room for the fewest output
    tokens."""
    if not prompt_token_ids:
        raise ValueError("the prompt must hold at least one token")
    if len(prompt_token_ids) > limits.max_model_len:
        raise ValueError(
            f"this model's maximum context length is {limits.max_model_len} tokens, and the prompt has "
            f"{len(prompt_token_ids)}; shorten the prompt"
        )
    if len(prompt_token_ids) + num_output_tokens > limits.max_model_len:
        raise ValueError(
            f"this model's maximum context length is {limits.max_model_len} tokens, and the prompt's "
            f"{len(prompt_token_ids)} tokens leave no room for an output; shorten the prompt"
        )
    _check_vocabulary("the prompt", prompt_token_ids, limits)


def check_sampling_params(params: SamplingParams, limits: ModelLimits) -> None:
    """Check token ids against the vocabulary, the numbers of log probabilities, and whether a grammar is possible."""
    if params.grammar is not None:
        if not limits.grammars:
            raise ValueError("this engine does not support grammars")
        _check_vocabulary("start_after", params.grammar.start_after, limits)
        _check_vocabulary("free_if_first", params.grammar.free_if_first, limits)
    _check_vocabulary("logit_bias", params.logit_bias, limits)
    _check_vocabulary("allowed_token_ids", params.allowed_token_ids, limits)
    _check_vocabulary("stop_token_ids", params.stop_token_ids, limits)
    _check_vocabulary("logprob_token_ids", params.logprob_token_ids, limits)
    for sequence in params.bad_words_token_ids:
        _check_vocabulary("bad_words_token_ids", sequence, limits)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > limits.max_logprobs:
            raise ValueError(f"{name} must be at most {limits.max_logprobs}, got {count}")


def check_pooling_params(request: EngineCoreRequest, limits: ModelLimits) -> None:
    """Check that the model can do the task of a pooled request, which has no other parameters."""
    params = request.pooling_params
    if params is None:
        if limits.pooling_only:
            raise ValueError("this model generates no tokens; it supports pooling tasks only")
        return
    if request.sampling_params not in _UNSET:
        raise ValueError("a pooled request cannot have sampling_params")
    if params.task not in limits.pooling_tasks:
        raise ValueError(f"this model does not support the pooling task {params.task.name}")
    if request.resumed_token_ids:
        raise ValueError("a pooled request cannot have resumed_token_ids")
    _check_vocabulary("score_token_ids", params.score_token_ids, limits)
    if params.dimensions is not None and params.dimensions > limits.embedding_size:
        raise ValueError(f"dimensions must be at most {limits.embedding_size}, got {params.dimensions}")


def check_resumed(request: EngineCoreRequest, limits: ModelLimits) -> None:
    """Check that resumed tokens are in the vocabulary and leave at least one token to generate."""
    resumed = request.resumed_token_ids
    _check_vocabulary("resumed_token_ids", resumed, limits)
    max_tokens = request.sampling_params.max_tokens
    if resumed and max_tokens is not None and len(resumed) >= max_tokens:
        raise ValueError(f"resumed_token_ids holds {len(resumed)} tokens, so max_tokens ({max_tokens}) leaves none")
    if resumed and len(request.prompt_token_ids) + len(resumed) >= limits.max_model_len:
        raise ValueError(
            f"prompt and resumed_token_ids fill the model's maximum context length of {limits.max_model_len} tokens"
        )


def _check_vocabulary(where: str, token_ids: Iterable[int], limits: ModelLimits) -> None:
    for extreme in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= extreme < limits.vocab_size:
            raise ValueError(
                f"token id {extreme} in {where} is outside the model's vocabulary of {limits.vocab_size} tokens"
            )
