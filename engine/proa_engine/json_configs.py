"""Configurations that a user gives as JSON: of the model's pooling, and of draft tokens. Names are vLLM's."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Final, Literal, Self

from proa.tokenizer_files import SAMPLING_DEFAULTS

TASKS: Final = ("embed", "token_embed", "classify", "token_classify")
POOLING_TYPES: Final = ("CLS", "LAST", "MEAN")
METHODS = ("ngram",)
MAX_SPECULATIVE_TOKENS = 32
MAX_NGRAM = 16


class JsonConfig:
    """The base of frozen dataclasses. Their constructors raise `ValueError` naming the field that is wrong."""

    __slots__ = ()
    NAME: ClassVar[str]  # of the option

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Raises `ValueError`, also for an unknown or missing name."""
        assert is_dataclass(cls)
        known, values = fields(cls), cls._renamed(values)
        if unknown := sorted(set(values) - {field.name for field in known}):
            names = ", ".join(field.name for field in known)
            raise ValueError(f"{cls.NAME} has no field {unknown[0]!r}; its fields are {names}")
        for field in known:
            if field.default is MISSING and field.name not in values:
                raise ValueError(f"{cls.NAME} must name {field.name}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a JSON object. Raises `ValueError` as `from_mapping` does."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{cls.NAME} must be JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{cls.NAME} must be a JSON object, got {text}")
        return cls.from_mapping(values)

    @classmethod
    def _renamed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`values` with second names of fields replaced by the first ones."""
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig(JsonConfig):
    """What the user changes of a model's pooling. None: as the model's files say."""

    NAME = "pooler_config"
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None  # the only one of the engine
    pooling_type: Literal["CLS", "LAST", "MEAN"] | None = None  # of `embed` and `classify`
    use_activation: bool | None = None  # embeddings get length 1, labels become probabilities
    enable_chunked_processing: bool = False  # inputs to embed that are too long for the model are embedded in parts
    max_embed_len: int | None = None  # maximum tokens of such an input

    def __post_init__(self) -> None:
        for name, choices in (("task", TASKS), ("pooling_type", POOLING_TYPES)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("use_activation", "enable_chunked_processing"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        length = self.max_embed_len
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or not 0 < length < 2**31):
            raise ValueError(f"max_embed_len must be an integer above 0, got {length!r}")
        if self.enable_chunked_processing != (length is not None):
            raise ValueError("enable_chunked_processing and max_embed_len need each other")

    @classmethod
    def _renamed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`seq_pooling_type` is `pooling_type` too."""
        if "seq_pooling_type" not in values:
            return values
        if "pooling_type" in values:
            raise ValueError("pooler_config must have one of pooling_type and seq_pooling_type")
        return {"pooling_type" if name == "seq_pooling_type" else name: value for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig(JsonConfig):
    """N-gram prompt lookup: find the request's last tokens earlier in it, as many as possible, and draft the tokens
    that followed their latest occurrence."""

    NAME = "speculative_config"
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


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `ValueError`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def check_sampling_defaults(values: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a name in override_generation_config that is no sampling parameter with a default of the
    model's, or for a value that is no number."""
    for name, value in values.items():
        if name not in SAMPLING_DEFAULTS:
            raise ValueError(f"override_generation_config cannot change {name}, only {', '.join(SAMPLING_DEFAULTS)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} of override_generation_config must be a number, got {value!r}")
