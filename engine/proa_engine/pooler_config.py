"""PoolerConfig: what the user changes of a model's pooling. Names are vLLM's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

TASKS: Final = ("embed", "token_embed", "classify", "token_classify")
POOLING_TYPES: Final = ("CLS", "LAST", "MEAN")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """None: as the model's files say. Raises `ValueError` naming the field that is wrong."""

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
    def from_mapping(cls, values: Mapping[str, Any]) -> "PoolerConfig":
        """`seq_pooling_type` is `pooling_type` too. Raises `ValueError`, also for an unknown name."""
        given = dict(values)
        if "seq_pooling_type" in given:
            if "pooling_type" in given:
                raise ValueError("pooler_config must have one of pooling_type and seq_pooling_type")
            given["pooling_type"] = given.pop("seq_pooling_type")
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(f"pooler_config has no field {unknown[0]!r}; its fields are {', '.join(names)}")
        return cls(**given)

    @classmethod
    def from_json(cls, text: str) -> "PoolerConfig":
        """From a JSON object. Raises `ValueError` as `from_mapping` does."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"pooler_config must be JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"pooler_config must be a JSON object, got {text}")
        return cls.from_mapping(values)
