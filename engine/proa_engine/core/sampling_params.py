"""SamplingParams: how a request's tokens are chosen, with the names that vLLM's users know.

Checks what can be checked without a model; the model's own limits are in `validation`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_KEY = 2**64 - 1


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Decoding knobs of one request.

    The first group is read at the edge that has a tokenizer (the offline `LLM`, the gateway) and resolved into the
    second; the engine core and the sampler read only the second. Lists are accepted and kept as tuples, -1 as
    `top_k` means all. Raises `ValueError` naming the parameter that is out of range.

    vLLM's users change theirs between calls, so fields can be set; `dataclasses.replace` checks what they are then, and
    whoever takes a request in goes on with such a copy, which nobody changes.
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
    temperature: float = 1.0  # 0: greedy
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
    logprobs: int | None = None  # likeliest tokens beside the sampled one; None: no log probabilities
    prompt_logprobs: int | None = None
    key: int | None = None  # 64-bit root of the sampling noise; drawn at the edge from (seed, choice index)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "n": _integer("n", self.n, low=1),
            "seed": _optional_integer("seed", self.seed, low=-(2**63), high=MAX_KEY),
            "stop": _strings("stop", self.stop),
            "bad_words": _strings("bad_words", self.bad_words),
            "temperature": _number("temperature", self.temperature, low=0),
            "top_p": _number("top_p", self.top_p, above=0, high=1),
            "top_k": max(0, _integer("top_k", self.top_k, low=-1)),
            "min_p": _number("min_p", self.min_p, low=0, high=1),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, low=-2, high=2),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, low=-2, high=2),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, above=0),
            "logit_bias": _biases(self.logit_bias),
            "allowed_token_ids": _token_ids("allowed_token_ids", self.allowed_token_ids),
            "bad_words_token_ids": _sequences(self.bad_words_token_ids),
            "max_tokens": _optional_integer("max_tokens", self.max_tokens, low=1),
            "min_tokens": _integer("min_tokens", self.min_tokens, low=0),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "logprobs": _optional_integer("logprobs", self.logprobs, low=0),
            "prompt_logprobs": _optional_integer("prompt_logprobs", self.prompt_logprobs, low=0),
            "key": _optional_integer("key", self.key, low=0, high=MAX_KEY),
        }
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        for name, value in checked.items():
            setattr(self, name, value)


def _number(
    name: str, value: float, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> float:
    """`value` as a finite float within [low, high] and greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if low is not None and value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if above is not None and value <= above:
        raise ValueError(f"{name} must be greater than {above}, got {value}")
    if high is not None and value > high:
        raise ValueError(f"{name} must be at most {high}, got {value}")
    return float(value)


def _integer(name: str, value: int, *, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise ValueError(f"{name} must be at most {high}, got {value}")
    return value


def _optional_integer(name: str, value: int | None, *, low: int, high: int | None = None) -> int | None:
    return None if value is None else _integer(name, value, low=low, high=high)


def _strings(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"{name} must hold non-empty strings, got {string!r}")
    return strings


def _token_ids(name: str, value: Iterable[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(_integer(f"a token id in {name}", token_id, low=0) for token_id in value)


def _sequences(value: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    sequences = tuple(_token_ids("bad_words_token_ids", sequence) for sequence in value)
    if not all(sequences):
        raise ValueError("bad_words_token_ids must hold non-empty sequences of token ids")
    return sequences


def _biases(value: Mapping[int, float] | None) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token_id, bias in (value or {}).items():
        _integer("a token id in logit_bias", token_id, low=0)
        biases[token_id] = _number(f"logit_bias of token {token_id}", bias, low=-100, high=100)
    return biases
