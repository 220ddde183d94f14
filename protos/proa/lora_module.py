"""LoraModule: a LoRA adapter that a flag of the engine or of the gateway names. Names are vLLM's."""

import json
from dataclasses import dataclass

_FIELDS = {"name", "path", "base_model_name"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """Raises `ValueError` for an empty value."""

    name: str  # by which requests ask for it
    path: str  # folder with adapter_config.json and adapter_model.safetensors, in the engines' file system
    base_model_name: str | None = None  # None: the only model, as always in an engine

    def __post_init__(self) -> None:
        if not self.name or not self.path or self.base_model_name == "":
            raise ValueError(f"an adapter needs a name and a path, got {self.name!r} and {self.path!r}")

    @classmethod
    def parse(cls, text: str) -> "LoraModule":
        """Parse NAME=PATH, or a JSON object with `name`, `path` and perhaps `base_model_name`. Raises `ValueError`."""
        if not text.startswith("{"):
            name, _, path = text.partition("=")
            return cls(name=name, path=path)
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"lora_modules must be NAME=PATH or JSON: {error}") from error
        if not {"name", "path"} <= values.keys() <= _FIELDS or not all(
            isinstance(each, str) for each in values.values()
        ):
            raise ValueError(f"{text} must have name and path, and may have base_model_name: strings")
        return cls(**values)
