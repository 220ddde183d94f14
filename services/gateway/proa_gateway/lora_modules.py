"""LoraModule: an adapter that the gateway's flags name."""

import json
from dataclasses import dataclass

_FIELDS = {"name", "path", "base_model_name"}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """`path` is in the engines' file system. `base_model_name` None: the gateway's only model."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_lora_module(text: str) -> LoraModule:
    """Read `NAME=PATH` or, as vLLM does, a JSON object. Raises `ValueError`."""
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is not JSON: {error}") from None
        texts = all(isinstance(value, str) for value in fields.values())
        if not texts or not {"name", "path"} <= fields.keys() <= _FIELDS:
            raise ValueError(f"{text!r} must have name and path, and may have base_model_name: strings")
        module = LoraModule(**fields)
    else:
        name, _, path = text.partition("=")
        module = LoraModule(name, path)
    if not module.name or not module.path or module.base_model_name == "":
        raise ValueError(f"{text!r} is not NAME=PATH")
    return module
