"""SamplingParams: how a request's tokens are chosen, with vLLM's names.

Checks everything that can be checked without a model; the model's own limits are checked by the engine.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from proa.contract.audio import TimestampRules
from proa.contract.grammar import Grammar, StructuredOutputsParams
from proa.contract.outputs import LOCAL

MAX_PATTERN_SIZE = 512

MAX_KEY = 2**64 - 1
_KEY_DOMAIN = b"proa.sampling.v1"
MAX_LOGPROB_TOKEN_IDS = 128


def choice_key(seed: int, index: int) -> int:
    """The key of the sampling noise of choice `index`, counted from 0; 0 <= key < 2**64.

    The gateway and the offline `LLM` derive the same keys: a request for `n` choices becomes `n` engine requests with
    the keys of (seed, choice index). Without a seed from the client, one random seed is drawn for all choices. The seed
    is taken modulo 2**64, so it may be negative. The key is the first eight bytes, little-endian, of the SHA-256 of the
    domain, the seed and the index, both as little-endian unsigned 64-bit words.
    """
    if index < 0:
        raise ValueError(f"choice index must not be negative, got {index}")
    message = _KEY_DOMAIN + (seed & MAX_KEY).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetectionParams:
    """An output ends when its last tokens are one pattern `min_count` times in a row.

    Sizes of patterns are in tokens; `min_pattern_size` 0 is 1, and `max_pattern_size` 0 detects nothing. Raises
    `ValueError`.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            raise ValueError(
                f"repetition_detection: min_pattern_size ({self.min_pattern_size}) must be at least 0 and at most "
                f"max_pattern_size ({self.max_pattern_size}), which must be at most {MAX_PATTERN_SIZE}"
            )
        if not 0 <= self.min_count < 2**32:
            raise ValueError(
                f"repetition_detection: min_count must be at least 0 and below 2**32, got {self.min_count}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(f"repetition_detection: min_count must be at least 2, got {self.min_count}")

    def is_met(self, token_ids: Sequence[int], start: int) -> bool:
        """Whether the tokens from index `start` on end with such a repetition.

        Compares the last token with one before it for each size, and slices only where they are equal: 4 us for 32
        sizes, 55 us for 512.
        """
        sizes = range(max(1, self.min_pattern_size), self.max_pattern_size + 1)
        num_tokens = len(token_ids) - start
        return any(
            size * self.min_count <= num_tokens
            and token_ids[-1] == token_ids[-1 - size]
            and token_ids[-size * self.min_count : -size] == token_ids[-size * (self.min_count - 1) :]
            for size in sizes
        )


def _checked(default: Any, check: Callable[[str, Any], Any], **metadata: Any) -> Any:
    """A field whose value is replaced by `check(name, value)`, which raises `ValueError` for a bad one."""
    return field(default=default, metadata={"check": check, **metadata})


def _number(default: float, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> Any:
    """A finite float within [low, high] and greater than `above`."""
    return _checked(default, lambda name, value: _check_number(name, value, low, high, above))


def _integer(
    default: int | None, *, low: int, high: float = math.inf, optional: bool = False, wire: bool = True
) -> Any:
    """An integer within [low, high]. `optional`: or None."""

    def check(name: str, value: int | None) -> int | None:
        return None if optional and value is None else _check_integer(name, value, low, high)

    return _checked(default, check, wire=wire)


def _check_number(name: str, value: Any, low: float, high: float, above: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if value <= above:
        raise ValueError(f"{name} must be greater than {above}, got {value}")
    if value > high:
        raise ValueError(f"{name} must be at most {high}, got {value}")
    return float(value)


def _check_integer(name: str, value: Any, low: int, high: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if value > high:
        raise ValueError(f"{name} must be at most {high}, got {value}")
    return value


def _check_iterable(name: str, value: Any) -> Iterable[Any]:
    """`value`, or nothing if it is None."""
    if value is not None and not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list, got {value!r}")
    return value or ()


def _check_strings(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(_check_iterable(name, value))
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"{name} must hold non-empty strings, got {string!r}")
    return strings


def _check_sequence(name: str, value: Iterable[int] | None) -> tuple[int, ...]:
    token_ids = tuple(_check_iterable(name, value))
    if set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0:  # lists may have 200,000 of them
        return token_ids
    return tuple([_check_integer(f"a token id in {name}", token_id, 0) for token_id in token_ids])


def _check_token_ids(name: str, value: Iterable[int] | None) -> tuple[int, ...]:
    """Return each token id once, in the order of first mention, because the cost of a step grows with their number."""
    return tuple(dict.fromkeys(_check_sequence(name, value)))


def _check_sequences(name: str, value: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Return each sequence once."""
    sequences = tuple(dict.fromkeys([_check_sequence(name, sequence) for sequence in _check_iterable(name, value)]))
    if not all(sequences):
        raise ValueError(f"{name} must hold non-empty sequences of token ids")
    return sequences


def _check_biases(name: str, value: Mapping[int, float] | None) -> dict[int, float]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict, got {value!r}")
    biases: dict[int, float] = {}
    for token_id, bias in (value or {}).items():
        _check_integer(f"a token id in {name}", token_id, 0)
        biases[token_id] = _check_number(f"{name} of token {token_id}", bias, -100, 100, -math.inf)
    return biases


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Decoding parameters of one request.

    The first group is used where there is a tokenizer (the gateway, the offline `LLM`), which resolves it into the
    second; only the second is sent, and read by the engine. Lists are accepted and kept as tuples. Raises `ValueError`
    naming the parameter that is out of range.

    Fields may be set later, as vLLM's users do; `dataclasses.replace` checks them again in the copy that it makes.
    """

    n: int = _integer(1, low=1, wire=False)
    seed: int | None = _integer(None, low=-(2**63), high=MAX_KEY, optional=True, wire=False)  # None or -1: random
    stop: tuple[str, ...] = _checked((), _check_strings, wire=False)
    bad_words: tuple[str, ...] = _checked((), _check_strings, wire=False)
    include_stop_str_in_output: bool = field(default=False, metadata=LOCAL)
    skip_special_tokens: bool = field(default=True, metadata=LOCAL)
    detokenize: bool = field(default=True, metadata=LOCAL)
    structured_outputs: StructuredOutputsParams | None = field(default=None, metadata=LOCAL)

    key: int | None = _integer(None, low=0, high=MAX_KEY, optional=True)  # 64-bit, from (seed, choice index)
    temperature: float = _number(1.0, low=0)  # 0: greedy
    top_p: float = _number(1.0, above=0, high=1)
    top_k: int = _integer(0, low=-1)  # 0: all; -1 is accepted for it
    min_p: float = _number(0.0, low=0, high=1)
    presence_penalty: float = _number(0.0, low=-2, high=2)
    frequency_penalty: float = _number(0.0, low=-2, high=2)
    repetition_penalty: float = _number(1.0, above=0)
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata={"check": _check_biases})
    allowed_token_ids: tuple[int, ...] = _checked((), _check_token_ids)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = _checked((), _check_sequences)
    max_tokens: int | None = _integer(16, low=1, optional=True)  # None: up to the context's end
    min_tokens: int = _integer(0, low=0)
    stop_token_ids: tuple[int, ...] = _checked((), _check_token_ids)
    ignore_eos: bool = False
    logprobs: int | None = _integer(None, low=0, optional=True)  # most likely tokens beside the sampled one; None: none
    logprob_token_ids: tuple[int, ...] = _checked((), _check_token_ids)  # in place of the most likely; sets `logprobs`
    prompt_logprobs: int | None = _integer(None, low=0, optional=True)
    grammar: Grammar | None = None  # what the output must match
    repetition_detection: RepetitionDetectionParams | None = None
    speculative: bool = True  # steps may verify draft tokens, which change no output
    begin_suppress_token_ids: tuple[int, ...] = _checked((), _check_token_ids)  # not the first token of the output
    timestamps: TimestampRules | None = None  # the output has Whisper's timestamps

    def __post_init__(self) -> None:
        for name, check in _CHECKS:
            setattr(self, name, check(name, getattr(self, name)))
        self.top_k = max(0, self.top_k)
        if self.seed == -1:
            self.seed = None
        if self.structured_outputs is not None and self.grammar is not None:
            raise ValueError("structured_outputs and grammar exclude each other")
        if self.timestamps is not None and (self.structured_outputs is not None or self.grammar is not None):
            raise ValueError("timestamps exclude structured_outputs and a grammar")
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            count = len(self.logprob_token_ids)
            raise ValueError(f"logprob_token_ids must hold at most {MAX_LOGPROB_TOKEN_IDS} token ids, got {count}")
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")

    def with_key(self, key: int) -> "SamplingParams":
        """A copy for another choice. Nothing else is checked again."""
        other = copy(self)
        other.key = key
        return other


_CHECKS = [(item.name, item.metadata["check"]) for item in fields(SamplingParams) if "check" in item.metadata]
