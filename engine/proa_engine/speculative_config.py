"""SpeculativeConfig: how draft tokens are proposed. Names are vLLM's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

METHODS = ("ngram",)
MAX_SPECULATIVE_TOKENS = 32
MAX_NGRAM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """N-gram prompt lookup: find the request's last tokens earlier in it, as many as possible, and draft the tokens
    that followed their latest occurrence.

    Raises `ValueError` naming the field that is out of range.
    """

    method: Literal["ngram"]
    num_speculative_tokens: int  # maximum in one step
    prompt_lookup_max: int = 5  # maximum length of the n-gram looked up
    prompt_lookup_min: int = 1  # minimum length of the n-gram looked up

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method}")
        for name, most in (
            ("num_speculative_tokens", MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_max", MAX_NGRAM),
            ("prompt_lookup_min", MAX_NGRAM),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be an integer from 1 to {most}, got {value!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SpeculativeConfig":
        """Raises `ValueError`, also for an unknown or missing name."""
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(names)):
            raise ValueError(f"speculative_config has no field {unknown[0]!r}; its fields are {', '.join(names)}")
        for name in ("method", "num_speculative_tokens"):
            if name not in values:
                raise ValueError(f"speculative_config must name {name}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        """From a JSON object. Raises `ValueError` as `from_mapping` does."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"speculative_config must be JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"speculative_config must be a JSON object, got {text}")
        return cls.from_mapping(values)
