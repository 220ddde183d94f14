"""LoraModule: an adapter that is loaded when the engine starts. Names are vLLM's."""

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """Raises `ValueError` for an empty name or path."""

    name: str  # by which requests ask for it
    path: str  # of a folder with adapter_config.json and adapter_model.safetensors, or as `resolve_lora` takes it

    def __post_init__(self) -> None:
        if not self.name or not self.path:
            raise ValueError(f"an adapter needs a name and a path, got {self.name!r} and {self.path!r}")

    @classmethod
    def parse(cls, text: str) -> "LoraModule":
        """From NAME=PATH, or a JSON object with `name` and `path`. Raises `ValueError`."""
        if not text.startswith("{"):
            name, _, path = text.partition("=")
            return cls(name=name, path=path)
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"lora_modules must be NAME=PATH or JSON: {error}") from error
        return cls(name=str(values.get("name") or ""), path=str(values.get("path") or ""))
