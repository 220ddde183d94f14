"""SamplingParams: how a request's tokens are chosen, with the names that vLLM's users know."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Decoding knobs of one request.

    The first group is read at the edge that has a tokenizer (the offline `LLM`, the gateway) and resolved into the
    second; the engine core and the sampler read only the second. Raises `ValueError` naming the parameter that is
    out of range.
    """

    # Resolved at the edge.
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    # Read by the engine.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int | None = 16  # None: up to the context's end
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    key: int | None = None  # 64-bit root of the sampling noise; drawn at the edge from (seed, choice index)
